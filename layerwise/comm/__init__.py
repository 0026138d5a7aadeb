"""Communication between ranks: over torch.distributed, or none."""
