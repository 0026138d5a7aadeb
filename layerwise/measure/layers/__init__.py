"""Times of layers."""
