"""What a training loop does that would not come out as on one device: refused with a sentence."""
