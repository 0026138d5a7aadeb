"""A rank's parameters and buffers: their boxes, their first values."""
