"""Numbers of GPUs on a command line: `16`, `1,2,4`, `1..1024` (the powers of two)."""

from __future__ import annotations

import argparse

from layerwise.machine import MAX_GPUS


def counts(text: str) -> tuple[int, ...]:
    """`1..8,12` -> (1, 2, 4, 8, 12): each number once, in order. argparse's error for anything else."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        try:
            low, high = int(first), int(last if dots else first)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not numbers of GPUs such as 16, 1,2,4 or 1..1024 (the powers of two)"
            ) from None
        if not 1 <= low <= high <= MAX_GPUS:
            raise argparse.ArgumentTypeError(f"{part!r}: from 1 to {MAX_GPUS:,}, the smaller number first")
        powers = [1 << n for n in range(MAX_GPUS.bit_length()) if low <= 1 << n <= high]
        if dots and not powers:
            raise argparse.ArgumentTypeError(f"{part!r} has no power of two in it; name the numbers: {low},{high}")
        numbers.update(powers if dots else [low])
    return tuple(sorted(numbers))
