"""Predictor: computes boxes of predictions for samples, in one pass or as the mean of several."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Literal

import torch
from torch import Tensor

from layerwise.comm.base import CommError
from layerwise.comm.solo import SoloComm
from layerwise.comm.together import agree
from layerwise.errors import LayerwiseError, foreign
from layerwise.files import JSON
from layerwise.geometry import Box
from layerwise.inference.blend import Blend, slab
from layerwise.inference.cases import Cases
from layerwise.inference.windows import profile, starts
from layerwise.partition.place import Each
from layerwise.quantities import parse_bytes
from layerwise.run.parallel import ParallelModule, of
from layerwise.run.shapes import Sized, Sizes
from layerwise.train.session import enough_memory
from layerwise.volumes.sources import SampleSource

MORE_MEMORY = "use a smaller memory limit or window, or more ranks"
MULTIPLES = (1, 2, 4, 8, 16, 32, 64)  # of extents, which networks with strides require
Reduce = Literal["argmax", "softmax", "sigmoid"] | Callable[[Tensor], Tensor]
Boxed = tuple[Each, Tensor | None]  # every rank's box, and this rank's tensor


class Predictor:
    """Computes predictions. Every rank makes one alike.

    Attributes:
        model: The network, in evaluation.
        cases: The samples.
        comm: The ranks that share a sample: all, or each rank alone if the plan splits samples only.
        output: Index of the network's output.
        reduce: The reduction applied to a box of the output.
        window: Extents of a window; None: the planned size, if a sample needs more than `limit_bytes`.
        overlap: The fraction of a window that its neighbour covers too.
        mirror: Labels of the dimensions along which samples are also mirrored; results are averaged.
        limit_bytes: The memory that a pass may use on a device.
    """

    def __init__(
        self,
        model: ParallelModule,
        cases: Cases,
        output: int,
        reduce: Reduce | None,
        window: Sequence[int] | None,
        overlap: float,
        mirror: str,
        memory_limit: float | str | None,
    ) -> None:
        self.model, self.cases, self.output, self.reduce = model, cases, output, reduce
        self.window, self.overlap, self.mirror = window, overlap, mirror
        if memory_limit is not None and window is None and "memory_bytes" not in of(model).plan.predicted:
            raise LayerwiseError("memory_limit= needs a plan with predicted memory: pass window=")
        self.comm = SoloComm(of(model).device) if of(model).sized(cases.planned).alone else of(model).comm
        limits = agree(of(model).comm, lambda: (None, min(_limit(memory_limit, of(model).device), sys.float_info.max)))
        self.limit_bytes: float = min(limits[1])
        unknown = [label for label in mirror if label not in cases.labels]
        if unknown:
            raise LayerwiseError(f"mirror={mirror!r}: {unknown[0]!r} is not one of {', '.join(cases.labels)}")
        if (mirror or window is not None) and not cases.follows:
            raise LayerwiseError("window= and mirror= need a network whose output has the positions of its inputs")
        if window is not None and len(window) != len(cases.along()):
            raise LayerwiseError(f"window={tuple(window)} must have an extent for each of {', '.join(cases.labels)}")

    def batch(self, numbers: Sequence[int]) -> Iterator[Boxed]:
        """Yields reduced predictions of samples of equal shapes, one by one. Every rank of `comm`
        must call it alike.
        """

        def seen() -> tuple[Sizes, JSON]:
            shapes_here = self.cases.shapes(numbers[0])
            return shapes_here, [list(numbers), *map(list, shapes_here)]

        shapes, ranks = agree(self.comm, seen)
        if any(other != ranks[0] for other in ranks):
            raise LayerwiseError(f"the ranks see different samples or shapes: {ranks[0]} and others")
        passed = self._mean(numbers, shapes) if self.cases.follows else self._full(numbers, shapes)
        boxes, x = self._reduced(*passed)
        for place in range(len(numbers)):
            here = tuple(None if b is None or not b.lo[0] <= place < b.hi[0] else b for b in boxes)
            box = here[self.comm.rank]
            sample = None if x is None or box is None else x[place - box.lo[0]]
            yield tuple(None if b is None else Box(b.lo[1:], b.hi[1:]) for b in here), sample

    def _full(self, numbers: Sequence[int], shapes: Sizes) -> Boxed:
        sources = [box_input.source for box_input in self.cases.inputs]
        return self._pass(numbers, of(self.model).sized(shapes, len(numbers)), sources)

    def _mean(self, numbers: Sequence[int], shapes: Sizes) -> Boxed:
        """Returns one pass over padded samples, or the mean of passes over windows and mirrored samples."""
        cases, count = self.cases, len(numbers)
        extents = cases.extents(shapes)
        size, places = self._passes(extents, count)
        sized = of(self.model).sized(cases.sized(size), count)
        full = Box.full((count, sized.outputs[self.output][1], *extents))
        ways = list(product(*((False, True) if label in self.mirror else (False,) for label in cases.labels)))
        blend: Blend | None = None
        for place, way in product(places, ways):
            mirrored = [d for d, on in enumerate(way) if on]
            boxes, x = self._pass(numbers, sized, cases.regions(size, place, mirrored))
            region = Box((0, 0, *place), (*full.hi[:2], *(a + n for a, n in zip(place, size, strict=True))))
            backwards = [2 + d for d in mirrored]
            boxes = tuple(None if b is None else _placed(b, region, backwards) for b in boxes)
            x = x if x is None or not mirrored else x.flip(backwards)
            if len(places) * len(ways) == 1:
                return _cut(boxes, x, full, self.comm.rank)
            if blend is None:
                owned = tuple(slab(full, rank, self.comm.size, 2) for rank in range(self.comm.size))
                like = torch.empty(0, dtype=of(self.model).dtype, device=self.comm.device)
                blend = Blend(self.comm, owned, like)
            weights = [torch.from_numpy(profile(n)) if len(places) > 1 else None for n in size]
            blend.add(boxes, x, region, weights)
        assert blend is not None
        return blend.owned, blend.mean()

    def _passes(self, extents: tuple[int, ...], count: int) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """Returns the extents that each pass reads of samples with these extents, and where each pass begins."""
        plan, planned = of(self.model).plan, self.cases.extents(self.cases.planned)
        samples = plan.batch if self.comm is of(self.model).comm else max(1, plan.batch // plan.gpus)  # on a device
        needed = plan.predicted.get("memory_bytes", 0.0) * prod(extents) * count
        windowed = self.window is not None or needed > self.limit_bytes * prod(planned) * samples
        size = self._taken(tuple(self.window or planned) if windowed else extents, count)
        large = [max(n, m) for n, m in zip(extents, size, strict=True)]
        places = starts(large, size, self.overlap) if windowed else [(0,) * len(size)]
        before = [(n - m) // 2 for n, m in zip(large, extents, strict=True)]  # half of the padding
        return size, [tuple(a - b for a, b in zip(place, before, strict=True)) for place in places]

    def _taken(self, extents: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Returns the smallest extents, at least these, that the network accepts with outputs at the same positions."""
        refused: object = "its output has other positions than its input"
        for multiple in MULTIPLES:
            size = tuple(-(-n // multiple) * multiple for n in extents)
            try:
                returned = of(self.model).sized(self.cases.sized(size), count).outputs[self.output]
            except LayerwiseError as error:
                refused = error
                continue
            if returned[2:] == size:
                return size
        shape = self.cases.sized(extents)[0]
        raise LayerwiseError(f"the network accepts no samples of shape {shape}, even padded: {refused}")

    def _pass(self, numbers: Sequence[int], sized: Sized, sources: Sequence[SampleSource]) -> Boxed:
        read = agree(self.comm, lambda: (self.cases.read(numbers, sized.inputs, sources), None))[0]
        kind = CommError if self.comm.size > 1 else LayerwiseError  # it ends all ranks that compute together
        with enough_memory(of(self.model).plan, of(self.model).comm.rank, MORE_MEMORY, kind):
            boxes, x = sized.run(read)[self.output]
        return boxes, None if boxes[self.comm.rank] is None else x  # a rank without a box has an empty tensor

    def _reduced(self, boxes: Each, x: Tensor | None) -> Boxed:
        """Returns a prediction as it is written: float32, unless it is integers."""
        if x is not None and x.is_floating_point():
            x = x.float()
        if self.reduce is None:
            return boxes, x
        owned = [box for box in boxes if box is not None and box.volume]
        if len({(box.lo[1], box.hi[1]) for box in owned}) > 1:
            raise LayerwiseError(
                "the plan splits the classes of the output, but reduce= needs all of them: reduce them in the model"
            )
        if self.reduce in ("softmax", "sigmoid"):
            return boxes, x if x is None else (x.softmax(1) if self.reduce == "softmax" else x.sigmoid())
        classes = owned[0].hi[1]
        if self.reduce == "argmax":
            x = x if x is None else x.argmax(1).to(torch.uint8 if classes <= 256 else torch.int32)
            return tuple(None if b is None else Box((b.lo[0], *b.lo[2:]), (b.hi[0], *b.hi[2:])) for b in boxes), x
        assert callable(self.reduce)
        return self._by_user(self.reduce, boxes, x)

    def _by_user(self, reduce: Callable[[Tensor], Tensor], boxes: Each, x: Tensor | None) -> Boxed:
        """Returns a user's function of a box, which may change or drop the classes."""

        def act() -> tuple[Tensor | None, list[int] | None]:
            if x is None:
                return None, None
            with foreign("reduce= cannot be taken"):
                reduced = reduce(x)
            if isinstance(reduced, Tensor) and reduced.is_floating_point():
                reduced = reduced.float()
            if (
                not isinstance(reduced, Tensor)
                or reduced.shape[:1] + reduced.shape[reduced.dim() - x.dim() + 2 :] != x.shape[:1] + x.shape[2:]
            ):
                raise LayerwiseError(
                    "reduce= must return a tensor (n, classes, ...) or (n, ...) with the positions of its argument"
                )
            return reduced, list(reduced.shape[1 : reduced.dim() - x.dim() + 2])

        made, classes = agree(self.comm, act)
        middle = tuple(next(shape for shape in classes if shape is not None))
        boxes = tuple(
            None if b is None else Box((b.lo[0], *(0,) * len(middle), *b.lo[2:]), (b.hi[0], *middle, *b.hi[2:]))
            for b in boxes
        )
        return boxes, made


def _limit(wanted: float | str | None, device: torch.device) -> float:
    """Returns the bytes that a pass may use on a device."""
    if wanted is not None:
        return parse_bytes(wanted, "memory_limit")
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else float("inf")


def _placed(box: Box, region: Box, mirrored: Sequence[int]) -> Box:
    """Returns the box of a pass's output in the sample's positions. mirrored: dimensions read backwards."""
    lo, hi = list(box.lo), list(box.hi)
    for dim in mirrored:
        lo[dim], hi[dim] = region.shape[dim] - box.hi[dim], region.shape[dim] - box.lo[dim]
    pairs = tuple(zip(lo, hi, region.lo, strict=True))
    return Box(tuple(a + o for a, _, o in pairs), tuple(b + o for _, b, o in pairs))


def _cut(boxes: Each, x: Tensor | None, full: Box, rank: int) -> Boxed:
    """Returns boxes and this rank's tensor without the padding."""
    cut = tuple(None if box is None or not (box & full).volume else box & full for box in boxes)
    box, rest = boxes[rank], cut[rank]
    return cut, None if x is None or box is None or rest is None else x[rest.slices(box)]
