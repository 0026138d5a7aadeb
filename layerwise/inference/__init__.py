"""Answers for volumes that fit no device: read, computed, reduced and written box by box.

`predict` is the door, `command` that of `layerwise predict`; `predictor` computes windows and mirrors, `blend` adds
them up, `results` writes. It knows `run`, `volumes` and of `train` what evaluates.
"""
