"""Times of messages and collectives."""
