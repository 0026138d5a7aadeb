"""Data sets of the examples, which `layerwise run --data` names. Nothing else of layerwise needs them."""
