"""Constants of a PyTorch program: what depends on nothing that is fed or trained, and its value where that is cheap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch._subclasses import FakeTensor

from layerwise.errors import LayerwiseError
from layerwise.importers.torch.ops.table import DRAWING, SHAPED_ONLY, base_name
from layerwise.importers.torch.traced_program import Node, Ref, TracedProgram, called

MOST_ELEMENTS = 1 << 26  # of a constant whose value is kept: the masks of windows in volumes have 40 million
MOST_BYTES = 1 << 32  # of all of them
LIMIT = (
    f"layerwise computes constants of up to {MOST_ELEMENTS:,} elements: feed what the model makes of it (such as a "
    "mask) as an input"
)

FILLED = {"zeros": 0, "ones": 1, "full": None}  # with which number, whatever the size


@dataclass(frozen=True, slots=True)
class Missing:
    """Reads a constant that has no value: LayerwiseError."""

    reason: str

    def __call__(self) -> torch.Tensor | None:
        raise LayerwiseError(self.reason)


def is_constant(node: Node, known: Callable[[str], bool]) -> bool:
    """Whether a call gives the same at every step; `known` says so of its operands."""
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
    """Values of constants, computed as torch does."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._memory: dict[int, int] = {}  # bytes of each storage, by its address
        self._bytes = 0  # of all of them
        self.unknown: dict[str, str] = {}  # of which there is no value, and why

    def store(self, name: str, target: str, shape: tuple[int, ...], read: Callable[[], torch.Tensor | None]) -> None:
        """A buffer of the model: a copy of it, if it is small and has a value."""
        tensor = read() if prod(shape) <= MOST_ELEMENTS else None
        if prod(shape) > MOST_ELEMENTS:
            self.unknown[name] = f"buffer {target!r} has {prod(shape):,} elements, and {LIMIT}"
        elif tensor is None or isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            self.unknown[name] = f"buffer {target!r} has no value (the model is on the meta device): build it for real"
        elif tensor.layout == torch.strided:
            self._keep(name, tensor.detach().to("cpu", copy=True))

    def value(self, name: str) -> NDArray[np.generic] | None:
        """As an array, where it is known."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        array: NDArray[np.generic] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return array

    def compute(self, node: Node, layer: str) -> None:
        """Evaluates a call of constants, if all of them are known and the result is small."""
        made = self._evaluate(node)
        if made is None:
            self.unknown |= dict.fromkeys((v.name for v in node.outputs if v), self._reason(node, layer))
        results = made if isinstance(made, (tuple, list)) else (made,)
        for declared, result in zip(node.outputs, results, strict=False):
            if declared and isinstance(result, torch.Tensor) and tuple(result.shape) == declared.shape:
                self._keep(declared.name, result)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        """Notes a value. Raises LayerwiseError if all of them together are too many."""
        self._tensors[name] = tensor
        storage = tensor.untyped_storage()
        self._bytes += storage.nbytes() - self._memory.get(storage.data_ptr(), 0)
        self._memory[storage.data_ptr()] = storage.nbytes()
        if self._bytes > MOST_BYTES:
            raise LayerwiseError(
                f"the constants that the model computes, up to {name!r}, take more than {MOST_BYTES >> 20:,} MiB "
                "in all; make them inputs of the model"
            )

    def _reason(self, node: Node, layer: str) -> str:
        """Why a call has no value."""
        if node.overload is not None and torch.Tag.nondeterministic_seeded in node.overload.tags:
            return (
                f"layer {layer!r} draws random numbers ({node.target}), which would differ from rank to rank: use "
                "nn.Dropout and the like, or feed them as an input"
            )
        known = next((self.unknown[r.name] for r in self._read(node) if r.name in self.unknown), None)
        if known is not None:
            return known
        large = next((v.shape for v in node.outputs if v and prod(v.shape) > MOST_ELEMENTS), None)
        if large is not None:
            made = f"a constant of shape {large} in the forward pass"
            return f"layer {layer!r} ({node.target}) makes {made}, and {LIMIT}"
        return (
            f"layer {layer!r} computes {node.target} of nothing but constants, which layerwise does not: compute it "
            "once and make it a buffer of the model, or feed it as an input"
        )

    def _evaluate(self, node: Node) -> object:
        small = all(v is None or prod(v.shape) <= MOST_ELEMENTS for v in node.outputs)
        name = node.target.partition("::")[2].partition(".")[0]
        if not small and name.removeprefix("new_").removesuffix("_like") in FILLED:
            return _filled(node, name)
        if not small or node.overload is None or not node.target.startswith("aten::"):
            return None
        if torch.Tag.nondeterministic_seeded in node.overload.tags:
            return None
        if any(r.name not in self._tensors for r in self._read(node)):
            return None
        try:
            made = called(node, lambda ref: self._operand(ref, node), "cpu")
            return made.zero_() if "empty" in name and isinstance(made, torch.Tensor) else made  # the same everywhere
        except Exception:  # not worth knowing: it stays a constant without a value
            return None

    def _read(self, node: Node) -> list[Ref]:
        """Operands whose values matter."""
        return [] if base_name(node.target) in SHAPED_ONLY else list(node.operands)

    def _operand(self, ref: Ref, node: Node) -> torch.Tensor:
        if base_name(node.target) not in SHAPED_ONLY:
            return self._tensors[ref.name]
        like = node.outputs[0]  # only its type matters, and its shape: that of the result
        assert like is not None
        return torch.zeros((), dtype=getattr(torch, like.dtype)).expand(like.shape)


def _filled(node: Node, name: str) -> torch.Tensor | None:
    """A large tensor of one number: it takes the memory of one."""
    (out,) = node.outputs
    number = FILLED[name.removeprefix("new_").removesuffix("_like")]
    value = node.arguments.get("fill_value") if number is None else number
    if out is None or not isinstance(value, int | float):
        return None
    return torch.full((), value, dtype=getattr(torch, out.dtype)).expand(out.shape)
