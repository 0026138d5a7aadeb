"""A rank's parameters and buffers: their boxes and their initial values."""
