"""Volumes: every rank reads the boxes of inputs and targets that it needs, and writes its box of an output.

`loader` has `BoxLoader`, `sources` opens arrays and files, `reading` decides which boxes a rank reads. It knows `run`.
"""
