"""The training loop: steps of a plan on data, as one device would take them.

`loop` is what `fit` and `layerwise run` both call; `session`, `data`, `task`, `score` and `compare` are that
command's, `saving` says when a run saves. It knows `run` and `checkpoint`.
"""
