"""The training loop: steps of a plan on data, with the numbers of one device.

`fit` and `layerwise run` both call `loop`; `session`, `data`, `task`, `score` and `compare` belong to that command. The
room knows `run` and `checkpoint`.
"""
