"""Within: what a layer's backward pass reads of its output, where a reader's input holds it (`partition.within`)."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from layerwise.run.execute.kernels import Compute
from layerwise.run.schedule.layers import ScheduledEdge


class _Place:
    """Of a tensor that a kernel's backward pass reads."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class KeptOutput:
    """What the kernels of one layer keep of its output, in one forward pass."""

    def __init__(self) -> None:
        self._places: list[ref[_Place]] = []

    def compute(self, compute: Compute, inputs: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> Tensor:
        """The layer's output."""
        places = list[ref[_Place]]()  # what is saved lives as long as autograd has it, and autograd has `pack`, too

        def pack(x: Tensor) -> _Place:
            place = _Place(x.detach())
            places.append(ref(place))
            return place

        with saved_tensors_hooks(pack, _tensor):
            out = compute(inputs, given)
        self._places = [one for one in places if (place := one()) is not None and _same(place.tensor, out)]
        return out

    def move(self, edge: ScheduledEdge, given: Tensor | None) -> None:
        """It is kept as a part of what the reader was given; the memory of the output may go."""
        way, places, self._places = edge.redistribution, self._places, []
        own = way.transfer.own
        assert own is not None
        assert given is not None
        for place in filter(None, (one() for one in places)):
            place.tensor = given.detach()[own.slices(way.room)]


def _tensor(place: _Place) -> Tensor:
    return place.tensor


def _same(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype
