"""`python -m layerwise.run`: data, training loop, comparison with one device."""
