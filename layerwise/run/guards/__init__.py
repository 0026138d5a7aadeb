"""Refusals: what a training loop does that would give other numbers than one device."""
