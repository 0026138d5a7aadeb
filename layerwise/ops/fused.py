"""Fused: one operator, the views of its inputs before it and the element-wise followers after it.

A view (flatten, transpose, slice) moves nothing: fused into its consumer, it only changes which box of the producer
is needed. A follower (batch norm, relu, dropout, residual add) computes where its producer's output already lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from layerwise.ops.base import Dim, Maps, Op, Parameter, Space, space
from layerwise.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class Follower:
    """An element-wise operator whose input `slot` is the running result; its `extras` others come from outside."""

    op: Op
    slot: int = 0
    extras: int = 0


@dataclass(frozen=True, slots=True)
class Fused(Op):
    """`main` on its inputs, each through its chain of `views` (first applied first), then the `followers` in order.

    Inputs: those of `main`, then the extra inputs of each follower. `views` has one (possibly empty) chain an input.
    """

    kind: ClassVar[str] = "fused"
    main: Op
    views: tuple[tuple[Op, ...], ...]
    followers: tuple[Follower, ...] = ()

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        return self._spaces(inputs)[-1].out

    def stages(self, inputs: Sequence[TensorSpec]) -> tuple[tuple[Op, tuple[TensorSpec, ...]], ...]:
        viewed = [viewed_spec(spec, chain) for spec, chain in zip(inputs, self.views, strict=True)]
        count = len(viewed) - sum(f.extras for f in self.followers)
        stages: list[tuple[Op, tuple[TensorSpec, ...]]] = [(self.main, tuple(viewed[:count]))]
        running = space(*stages[0]).out
        for follower in self.followers:
            specs = viewed[count : count + follower.extras]
            count += follower.extras
            specs.insert(follower.slot, running)
            stages.append((follower.op, tuple(specs)))
            result = space(follower.op, tuple(specs)).out
            assert result.shape == running.shape, f"{follower.op} changes the shape: it cannot follow"
            running = result
        return tuple(stages)

    def _spaces(self, inputs: Sequence[TensorSpec]) -> list[Space]:
        return [space(op, specs) for op, specs in self.stages(inputs)]

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        first, *rest = self._spaces(inputs)
        direct = list(first.needs)
        for follower, s in zip(self.followers, rest, strict=True):
            direct += [maps for i, maps in enumerate(s.needs) if i != follower.slot]
        return tuple(
            through_views(maps, spec, chain) for maps, spec, chain in zip(direct, inputs, self.views, strict=True)
        )

    def late_inputs(self, inputs: Sequence[TensorSpec]) -> tuple[bool, ...]:
        extras = sum(f.extras for f in self.followers)
        return (False,) * (len(inputs) - extras) + (True,) * extras

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        first, *rest = self._spaces(inputs)
        late = [replace(p, name=f"{i}.{p.name}", late=True) for i, s in enumerate(rest) for p in s.parameters]
        return (*first.parameters, *late)

    def reductions(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Dim, ...]:
        first = self._spaces(inputs)[0]
        return first.dims[len(first.out.shape) :]

    def unsplit(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> frozenset[int]:
        barred = (i for s in self._spaces(inputs) for i, d in enumerate(s.dims[: len(out.shape)]) if d.label is None)
        return frozenset(barred)

    def rebatch(self, inputs: Sequence[TensorSpec], out: TensorSpec, new_inputs: Sequence[TensorSpec]) -> Op:
        chains, before, after = [], [], []
        for chain, old, new in zip(self.views, inputs, new_inputs, strict=True):
            views = []
            for view in chain:
                again = view.rebatch((old,), view.output(old), (new,))
                old, new = view.output(old), again.output(new)
                views.append(again)
            chains.append(tuple(views))
            before.append(old)
            after.append(new)
        count = len(before) - sum(f.extras for f in self.followers)
        old_inputs, new_inputs = tuple(before[:count]), tuple(after[:count])
        main = self.main.rebatch(old_inputs, space(self.main, old_inputs).out, new_inputs)
        return replace(self, main=main, views=tuple(chains))

    def at_batch(self, batch: int) -> Op:
        return replace(self, main=self.main.at_batch(batch))

    def rows(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "main": self.main.rows(),
            "views": [[v.rows() for v in chain] for chain in self.views],
            "followers": [{"op": f.op.rows(), "slot": f.slot, "extras": f.extras} for f in self.followers],
        }


def gradients_wanted(
    op: Op, inputs: Sequence[TensorSpec], flows: Sequence[bool], trained: Sequence[bool] | None = None
) -> list[bool]:
    """For each of an operator's stages, whether the backward pass goes on to what it reads.

    flows: whether a gradient flows back to each of `inputs`; trained: whether one is made of each of its parameters
    (default: of none that is a buffer; a layer knows which are frozen).
    """
    result: list[bool] = []
    running, taken, used = False, 0, 0
    for number, (stage, specs) in enumerate(op.stages(inputs)):
        outside = len(specs) - (number > 0)
        running = running or any(flows[taken : taken + outside])
        taken += outside
        result.append(running)
        own = [p.trainable for p in space(stage, specs).parameters]
        running = running or any(own if trained is None else trained[used : used + len(own)])
        used += len(own)
    return result


def viewed_spec(spec: TensorSpec, chain: Sequence[Op]) -> TensorSpec:
    """What a tensor looks like through a chain of views."""
    for view in chain:
        spec = view.output(spec)
    return spec


def through_views(maps: Maps, spec: TensorSpec, chain: Sequence[Op]) -> Maps:
    """Maps to the dimensions of `spec`, given the maps to the dimensions of its view through `chain`."""
    specs = [spec]
    for view in chain:
        specs.append(view.output(specs[-1]))
    for view, before, after in reversed(list(zip(chain, specs, specs[1:], strict=False))):
        (inner,) = view.needs((before,), after)
        maps = tuple(m if m.source is None else maps[m.source].then(m) for m in inner)
    return maps
