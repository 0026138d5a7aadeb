"""The passes over a schedule: forward, backward, and gradient sums."""
