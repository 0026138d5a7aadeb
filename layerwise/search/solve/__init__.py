"""The search without a memory limit: bounds, pruning, node and edge elimination, elimination of variables."""
