"""The cheapest strategy, and the proof that it is: `python -m layerwise.search MODEL --gpus N`."""
