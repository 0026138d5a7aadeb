"""The program of a step: what all devices do, as one ordered list of instructions.

`instructions` defines the kinds, `fold` passes each one to a consumer's table; the list is made from a graph and a
strategy. It knows `partition`; `cost` folds it, and `run` takes the forward pass from it.
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
