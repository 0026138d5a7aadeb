"""Communication between ranks: over torch.distributed, between threads, or none."""
