"""Measuring a machine: how long its layers take and what its links cost, written into a profile."""
