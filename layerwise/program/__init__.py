"""The program of a step: what all devices do, in order, as one list of instructions."""

from layerwise.program.build import program
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
