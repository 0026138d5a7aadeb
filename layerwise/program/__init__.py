"""The program of a step: what all devices do, in order, as one list of instructions.

`instructions` has what there is, `fold` goes through them by a consumer's table; the list is made of a graph and a
strategy. It knows `partition`; `cost` folds it, `run` takes the forward pass from it.
"""

from layerwise.program.instructions import (
    Bucket,
    Effects,
    Gradient,
    Instruction,
    Program,
    StepKind,
    StrategyFacts,
    fold,
    gradient_order,
)
from layerwise.program.order import program

__all__ = [
    "Bucket",
    "Effects",
    "Gradient",
    "Instruction",
    "Program",
    "StepKind",
    "StrategyFacts",
    "fold",
    "gradient_order",
    "program",
]
