"""Volumes: every rank reads the boxes of inputs and targets that it needs, and writes its box of an output.

`loader` is `BoxLoader`, `sources` opens arrays and files, `reading` says which boxes a rank reads. It knows `run`.
"""
