"""The cheapest strategy that fits into memory: multipliers, enumeration, the least memory."""
