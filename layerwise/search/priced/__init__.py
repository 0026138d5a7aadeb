"""The cheapest strategy that fits into memory: tables, prices of memory, moves, and the least memory of all."""
