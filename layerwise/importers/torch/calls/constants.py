"""Constants of a PyTorch program: what depends on nothing fed or trained, with its value if that is cheap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch._subclasses import FakeTensor

from layerwise.errors import LayerwiseError
from layerwise.importers.torch.calls import recipes
from layerwise.importers.torch.calls.recipes import MOST_ELEMENTS, Recipe
from layerwise.importers.torch.ops.table import DRAWING, SHAPED_ONLY, base_name
from layerwise.importers.torch.traced_program import Node, Ref, TracedProgram, called

MOST_BYTES = 1 << 32  # of all of them
LIMIT = (
    f"layerwise computes constants of up to {MOST_ELEMENTS:,} elements: feed what the model computes from it (such as "
    "a mask) as an input"
)

VIEWS = {"meshgrid", *recipes.EXPANDING}  # which take no memory, however large the result is
FILLED = {"zeros": 0, "ones": 1, "full": None}  # the number that fills them, whatever the size


@dataclass(frozen=True, slots=True)
class Missing:
    """A constant without a value: reading it raises LayerwiseError."""

    reason: str

    def __call__(self) -> torch.Tensor | None:
        raise LayerwiseError(self.reason)


def is_constant(node: Node, known: Callable[[str], bool]) -> bool:
    """Whether a call returns the same at every step; `known` says so for its operands."""
    name = base_name(node.target)
    return name not in DRAWING and (name in SHAPED_ONLY or all(known(ref.name) for ref in node.operands))


def constant_names(program: TracedProgram) -> set[str]:
    """All constants of a program, by name."""
    names = {source.value.name for source in program.sources if source.kind == "buffer"}
    for node in program.nodes:
        if is_constant(node, names.__contains__):
            names.update(v.name for v in node.outputs if v)
    return names


class Constants:
    """Values of constants, computed by torch."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._recipes: dict[str, Recipe] = {}
        self._memory: dict[int, int] = {}  # bytes of each storage, by its address
        self._bytes = 0  # of all storages
        self.unknown: dict[str, str] = {}  # constants without a value, and why

    def store(self, name: str, target: str, shape: tuple[int, ...], read: Callable[[], torch.Tensor | None]) -> None:
        """Stores a copy of one of the model's buffers, if it is small and has a value."""
        tensor = read() if prod(shape) <= MOST_ELEMENTS else None
        if prod(shape) > MOST_ELEMENTS:
            self.unknown[name] = f"buffer {target!r} has {prod(shape):,} elements, but {LIMIT}"
        elif tensor is None or isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            self.unknown[name] = (
                f"buffer {target!r} has no value, as the model is on the meta device: build it on a real device"
            )
        elif tensor.layout == torch.strided:
            self._keep(name, tensor.detach().to("cpu", copy=True))

    def value(self, name: str) -> NDArray[np.generic] | None:
        """The value as an array, or None."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        array: NDArray[np.generic] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return array

    def recipe(self, name: str) -> Recipe | None:
        """Returns the recipe that computes boxes of a large constant; None for others, and for those stored in full."""
        if name in self._recipes:
            return self._recipes[name]
        tensor = self._tensors.get(name)
        large = tensor is not None and tensor.numel() > recipes.WIDE
        if tensor is None or not large or tensor.untyped_storage().nbytes() >= tensor.nbytes:
            return None
        return recipes.stored(tensor)

    def compute(self, node: Node, layer: str) -> None:
        """Computes a call of constants, if all of them are known and the result is small; a large one's boxes later."""
        boxed = self._boxed(node)
        if boxed is not None:
            self._recipes[node.name] = boxed
            return
        made = self._evaluate(node)
        if made is None:
            self.unknown |= dict.fromkeys((v.name for v in node.outputs if v), self._reason(node, layer))
        results = made if isinstance(made, (tuple, list)) else (made,)
        for declared, result in zip(node.outputs, results, strict=False):
            if declared and isinstance(result, torch.Tensor) and tuple(result.shape) == declared.shape:
                self._keep(declared.name, result)

    def _boxed(self, node: Node) -> Recipe | None:
        out = node.outputs[0]
        large = len(node.outputs) == 1 and out is not None and prod(out.shape) > recipes.WIDE
        known = node.operands and all(r.name in self._tensors or r.name in self._recipes for r in node.operands)
        if not (large and known) or base_name(node.target) in SHAPED_ONLY:
            return None
        if base_name(node.target) in VIEWS and node.operands[0].name in self._tensors:
            return None  # takes no memory
        assert out is not None
        made = recipes.recipe(node, self._operand_recipe)
        return made if made is not None and made.shape == out.shape else None

    def _operand_recipe(self, name: str) -> Recipe:
        return self._recipes[name] if name in self._recipes else recipes.stored(self._tensors[name])

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        """Stores a value. Raises LayerwiseError if all values together are too large."""
        self._tensors[name] = tensor
        storage = tensor.untyped_storage()
        self._bytes += storage.nbytes() - self._memory.get(storage.data_ptr(), 0)
        self._memory[storage.data_ptr()] = storage.nbytes()
        if self._bytes > MOST_BYTES:
            raise LayerwiseError(
                f"computing the model's constants, up to {name!r}, takes more than {MOST_BYTES >> 20:,} MiB: pass them "
                "as inputs"
            )

    def _reason(self, node: Node, layer: str) -> str:
        """Why a call has no value."""
        if node.overload is not None and torch.Tag.nondeterministic_seeded in node.overload.tags:
            return (
                f"layer {layer!r} draws random numbers ({node.target}) that would differ between ranks: use nn.Dropout "
                "and the like, or pass them as an input"
            )
        known = next((self.unknown[r.name] for r in self._read(node) if r.name in self.unknown), None)
        if known is not None:
            return known
        shapes = [v.shape for v in node.outputs if v]
        shapes += [self._recipes[r.name].shape for r in self._read(node) if r.name in self._recipes]
        large = next((shape for shape in shapes if prod(shape) > MOST_ELEMENTS), None)
        if large is not None:
            made = f"a constant of shape {large} in the forward pass"
            return f"layer {layer!r} ({node.target}) creates {made}, but {LIMIT}"
        return (
            f"layer {layer!r} computes {node.target} from constants only, which layerwise cannot: compute it once and "
            "store it as a buffer, or pass it as an input"
        )

    def _evaluate(self, node: Node) -> object:
        small = all(v is None or prod(v.shape) <= MOST_ELEMENTS for v in node.outputs)
        small |= base_name(node.target) in VIEWS
        name = node.target.partition("::")[2].partition(".")[0]
        if not small and name.removeprefix("new_").removesuffix("_like") in FILLED:
            return _filled(node, name)
        if not small or node.overload is None or not node.target.startswith("aten::"):
            return None
        if torch.Tag.nondeterministic_seeded in node.overload.tags:
            return None
        if any(r.name not in self._tensors and r.name not in self._recipes for r in self._read(node)):
            return None
        try:
            made = called(node, lambda ref: self._operand(ref, node), "cpu")
            return made.zero_() if "empty" in name and isinstance(made, torch.Tensor) else made  # equal on all ranks
        except Exception:  # any failure: it stays a constant without a value
            return None

    def _read(self, node: Node) -> list[Ref]:
        """The operands whose values matter."""
        return [] if base_name(node.target) in SHAPED_ONLY else list(node.operands)

    def _operand(self, ref: Ref, node: Node) -> torch.Tensor:
        if base_name(node.target) not in SHAPED_ONLY:
            return self._recipes[ref.name]() if ref.name in self._recipes else self._tensors[ref.name]
        like = node.outputs[0]  # only its type and shape matter: those of the result
        assert like is not None
        return torch.zeros((), dtype=getattr(torch, like.dtype)).expand(like.shape)


def _filled(node: Node, name: str) -> torch.Tensor | None:
    """A large tensor filled with one number, in the memory of one element."""
    (out,) = node.outputs
    number = FILLED[name.removeprefix("new_").removesuffix("_like")]
    value = node.arguments.get("fill_value") if number is None else number
    if out is None or not isinstance(value, int | float):
        return None
    return torch.full((), value, dtype=getattr(torch, out.dtype)).expand(out.shape)
