"""The passes over a schedule: forward, backward, and the sums of gradients."""
