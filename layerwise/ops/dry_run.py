"""Dry runs: what a function of tensors makes, keeps and takes, seen on tensors that have shapes and no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Shaped = tuple[tuple[int, ...], str]  # shape and element type


@dataclass(frozen=True, slots=True)
class Made:
    """What a function makes; in bytes, beside its inputs and its result."""

    shape: tuple[int, ...]
    dtype: str
    flops: float  # of matrix products
    saved: int  # kept for the backward pass
    forward: int  # taken while the forward pass runs, freed or not
    backward: int  # taken while the backward pass runs


def dry_run(function: Callable[[list[Tensor]], Tensor], inputs: Sequence[Shaped]) -> Made:
    """Forward, and backward where there is a derivative. Raises what PyTorch raises at these shapes."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    counter, storages = FlopCounterMode(display=False), _Storages()
    with FakeTensorMode(), torch.enable_grad():
        given = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in inputs]
        leaves = [t.requires_grad_() for t in given if t.is_floating_point() or t.is_complex()]
        own = {storages.note(t, {}) for t in given}
        with counter, storages.made() as forward, storages.saved() as saved:
            out = function(given)
        own.add(storages.note(out, {}))
        with storages.made() as backward:
            try:
                if out.requires_grad:
                    torch.autograd.grad(out, leaves, out, allow_unused=True)
            except RuntimeError:  # it has no derivative: PyTorch says so where somebody asks for one
                backward.clear()
    kept, taken = (sum(n for key, n in sizes.items() if key not in own) for sizes in (saved, forward))
    dtype = str(out.dtype).removeprefix("torch.")
    return Made(tuple(out.shape), dtype, float(counter.get_total_flops()), kept, taken, sum(backward.values()))


@dataclass(slots=True)
class _Storages:
    """Memory by address: bytes of each."""

    held: list[Any] = field(default_factory=list)  # so that no other gets the address

    def note(self, tensor: Tensor, sizes: dict[int, int]) -> int:
        """Adds a tensor's memory to `sizes`. Returns its address."""
        storage = tensor.untyped_storage()
        self.held.append(storage)
        sizes[storage._cdata] = storage.nbytes()
        return int(storage._cdata)

    @contextmanager
    def made(self) -> Iterator[dict[int, int]]:
        """What is made within it."""
        sizes = dict[int, int]()
        with _observer()(lambda tensor: self.note(tensor, sizes)):
            yield sizes

    @contextmanager
    def saved(self) -> Iterator[dict[int, int]]:
        """What autograd saves within it."""
        from torch.autograd.graph import saved_tensors_hooks

        sizes = dict[int, int]()

        def pack(tensor: Tensor) -> Tensor:
            self.note(tensor, sizes)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield sizes


@cache
def _observer() -> Any:
    """The mode that shows every tensor that is made. Made here, as this module must be imported without torch."""
    import torch
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self, see: Callable[[Tensor], object]) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.see = see

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.see(leaf)
            return result

    return Observer
