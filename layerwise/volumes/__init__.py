"""Volumes: every rank reads the boxes of inputs and targets that it needs, and writes its box of an output."""
