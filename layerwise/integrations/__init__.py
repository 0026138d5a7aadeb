"""Integrations with the tools that people train and predict with; each needs its package."""
