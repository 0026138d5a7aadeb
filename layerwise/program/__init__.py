"""The program of a step: what all devices do, in order, as one list of instructions."""

from layerwise.program.build import program
from layerwise.program.instructions import (
    Bucket,
    Gradient,
    Instruction,
    Kind,
    Program,
    StrategyFacts,
    Table,
    fold,
    gradient_order,
)

__all__ = [
    "Bucket",
    "Gradient",
    "Instruction",
    "Kind",
    "Program",
    "StrategyFacts",
    "Table",
    "fold",
    "gradient_order",
    "program",
]
