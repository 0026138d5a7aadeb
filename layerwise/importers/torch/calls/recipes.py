"""Recipes: large constants that are computed box by box, such as a mask of all positions by all positions.

A pointwise call of constants is not made when the model is imported: it is a recipe, which makes any box of its result
of the same boxes of its operands. Shapes that only gain, lose or repeat dimensions of one element are followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.importers.torch.ops.table import base_name
from layerwise.importers.torch.traced_program import Node, called

Shape = tuple[int, ...]

MOST_ELEMENTS = 1 << 26  # of a constant whose value is stored: masks of windows in volumes have 40 million
WIDE = 1 << 20  # elements of a constant from which on it is a recipe
POINTWISE = {"where", "to", "_to_copy", "type_as", "clone", "contiguous", "detach", "alias", "lift_fresh_copy"}
EXPANDING = {"expand", "expand_as", "broadcast_to"}
RESHAPING = {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze"}


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """A constant of which any box can be computed."""

    shape: Shape
    make: Callable[[Box], torch.Tensor]
    alike: bool  # whether it is the same for all indices of its first dimension

    def box(self, box: Box) -> torch.Tensor:
        """Returns a box of it, made in slabs, as it has several steps: new memory, or a view of something small."""
        dim = next((i for i, extent in enumerate(box.shape) if extent > 1), 0)
        step = max(1, WIDE * box.shape[dim] // box.volume) if box.shape and box.volume else 0
        if not step or step >= box.shape[dim]:
            return self.make(box)
        out: torch.Tensor | None = None
        for lo in range(box.lo[dim], box.hi[dim], step):
            hi = min(lo + step, box.hi[dim])
            slab = Box((*box.lo[:dim], lo, *box.lo[dim + 1 :]), (*box.hi[:dim], hi, *box.hi[dim + 1 :]))
            made = self.make(slab)
            out = made.new_empty(box.shape) if out is None else out
            out[slab.slices(box)] = made
        assert out is not None
        return out

    def __call__(self) -> torch.Tensor:
        """Returns all of it. LayerwiseError if that is too large."""
        if prod(self.shape) > MOST_ELEMENTS:
            raise LayerwiseError(
                f"a constant of shape {self.shape} is computed in boxes, as it has more than {MOST_ELEMENTS:,} "
                "elements: feed it as an input, or use a plan that splits its readers"
            )
        return self.box(Box.full(self.shape))

    def negated(self) -> Recipe:
        """Returns the recipe of its logical negation."""
        return Recipe(self.shape, lambda box: self.make(box).logical_not(), self.alike)

    def with_rows(self, shape: Shape) -> Recipe | None:
        """Returns it with another number of rows, if all are the same; None if they are not."""
        if shape == self.shape:
            return self
        if not self.alike or shape[1:] != self.shape[1:]:
            return None

        def make(box: Box) -> torch.Tensor:
            one = Box((0, *box.lo[1:]), (1, *box.hi[1:]))
            return self.make(one).expand(box.shape)

        return Recipe(shape, make, alike=True)


def stored(tensor: torch.Tensor) -> Recipe:
    """Returns the recipe that cuts boxes from a tensor."""
    return Recipe(tuple(tensor.shape), lambda box: tensor[box.slices()], _alike(tensor))


def _alike(tensor: torch.Tensor) -> bool:
    """Whether all rows of a tensor are the same."""
    if tensor.dim() == 0 or tensor.shape[0] == 1 or tensor.stride(0) == 0:
        return tensor.dim() > 0
    first, second = tensor[:1], tensor[1:2]
    return torch.equal(first, second) and bool((tensor == first).all())  # the second tells most of them apart


def recipe(node: Node, operand: Callable[[str], Recipe]) -> Recipe | None:
    """Returns the recipe of a call, by the recipes of its operands; None if it is not pointwise."""
    name, out = base_name(node.target), node.outputs[0]
    if len(node.outputs) != 1 or out is None or node.overload is None or not node.target.startswith("aten::"):
        return None
    tags = node.overload.tags
    if torch.Tag.nondeterministic_seeded in tags or node.overload._schema.is_mutable:
        return None
    if torch.Tag.pointwise in tags or name in POINTWISE:
        return _pointwise(node, out.shape, {ref.name: operand(ref.name) for ref in node.operands})
    if name in EXPANDING or name in RESHAPING:
        x = operand(node.operands[0].name)
        return _expanded(x, out.shape) if name in EXPANDING else _reshaped(x, out.shape)
    return None


def _pointwise(node: Node, shape: Shape, operands: Mapping[str, Recipe]) -> Recipe:
    def make(box: Box) -> torch.Tensor:
        made = called(node, lambda ref: operands[ref.name].make(_below(box, operands[ref.name].shape)), "cpu")
        assert isinstance(made, torch.Tensor)
        return made

    alike = bool(shape) and all(len(x.shape) < len(shape) or x.alike for x in operands.values())
    return Recipe(shape, make, alike)


def _expanded(x: Recipe, shape: Shape) -> Recipe:
    alike = len(x.shape) < len(shape) or x.alike
    return Recipe(shape, lambda box: x.make(_below(box, x.shape)).expand(box.shape), alike)


def _reshaped(x: Recipe, shape: Shape) -> Recipe | None:
    """Returns None where dimensions are merged or parted."""
    long, other = ([i for i, extent in enumerate(of) if extent > 1] for of in (x.shape, shape))
    if [x.shape[i] for i in long] != [shape[i] for i in other]:
        return None

    def make(box: Box) -> torch.Tensor:
        lo, hi = [0] * len(x.shape), [1] * len(x.shape)
        for i, j in zip(long, other, strict=True):
            lo[i], hi[i] = box.lo[j], box.hi[j]
        return x.make(Box(tuple(lo), tuple(hi))).reshape(box.shape)

    return Recipe(shape, make, shape[:1] == (1,) or (long[:1] == [0] == other[:1] and x.alike))


def _below(box: Box, shape: Shape) -> Box:
    """The box of an operand that broadcasts to a result with this box."""
    spare = len(box.lo) - len(shape)
    pairs = [(0, 1) if extent == 1 else (box.lo[i], box.hi[i]) for i, extent in enumerate(shape, spare)]
    return Box(tuple(lo for lo, _ in pairs), tuple(hi for _, hi in pairs))
