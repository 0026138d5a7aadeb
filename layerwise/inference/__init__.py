"""Predictions for volumes that fit no device: read, computed, reduced and written box by box.

`predict` is the entry point, `command` is `layerwise predict`; `predictor` computes windows and mirrored samples,
`blend` adds them up, `results` writes. It knows `run`, `volumes` and the evaluation part of `train`.
"""
