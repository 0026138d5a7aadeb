"""Layer: an operator with its views and its epilogue, in its place in a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from layerwise.arguments import checked
from layerwise.errors import LayerwiseError
from layerwise.graph.types import Regions, Types, typed
from layerwise.ops.base import Op, Role, Stage, space
from layerwise.ops.facts import Parameter, Space
from layerwise.ops.opaque import TorchOp
from layerwise.ops.specs import same
from layerwise.tensor import ITEM_BYTES, TensorSpec


class StageGradients(NamedTuple):
    """A stage's backward pass: `inputs`: it computes gradients of its inputs; `result`: it receives one."""

    inputs: bool
    result: bool


@checked
@dataclass(frozen=True, slots=True)
class Layer:
    """One operator, with its fused epilogue, at given shapes.

    Attributes:
        name: Name, unique in its graph.
        op: The operator.
        inputs: The layers that feed it: the operator's inputs, then shared parameters.
        specs: Specs of the operator's own inputs.
        parameters: The model's names for the operator's parameters, in the operator's order.
        tied: Which of the parameters are edges: inputs[len(specs) + i] feeds parameter tied[i].
        epilogue: Names of the operators fused into it, in order.
        frozen: The names in `parameters` (for a Tied: its own name) that are not trained.
        types: Element types, if they differ from those that the operators determine (see `graph.mixed`).
        autocast: The model's own autocast regions around it.
        space: Dimensions, parameters and work, shared by all layers of equal operator and shapes.
        stages: The main operator, then the epilogue.

    Examples:
        >>> import layerwise
        >>> layer = layerwise.load_model("lenet5", 32).inner[0]
        >>> layer.kinds, layer.out.describe()
        ('conv', '(n=32, c=6, h=28, w=28)')
    """

    name: str
    op: Op
    inputs: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    parameters: tuple[str, ...] = ()
    tied: tuple[int, ...] = ()
    epilogue: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    types: Types | None = None
    autocast: Regions = ()
    space: Space = field(init=False, repr=False, compare=False)
    stages: tuple[Stage, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "space", space(self.op, self.specs))
            object.__setattr__(self, "stages", self.op.stages(self.specs))
        except LayerwiseError as error:
            raise LayerwiseError(f"layer {self.name!r} ({self.op.kind}): {error}") from None
        if self.types is not None:
            where, stages = typed(self.op, self.specs, self.types.made)
            object.__setattr__(self, "space", where)
            object.__setattr__(self, "stages", stages)
        if self.frozen:
            fixed = tuple(i for i, name in enumerate(self.parameters) if name in self.frozen)
            object.__setattr__(self, "space", _untrained(self.space, fixed))
        expected = [p.name for p in self.space.parameters]
        assert len(expected) == len(self.parameters), f"{self.name}: parameters {self.parameters} for {expected}"

    @property
    def out(self) -> TensorSpec:
        return self.space.out

    @property
    def all_types(self) -> Types:
        """The element types of every stage."""
        if self.types is not None:
            return self.types
        plain = tuple(stage.space.out.dtype for stage in self.stages)
        return Types(plain, plain, plain)

    @property
    def role(self) -> Role:
        return self.op.role

    @property
    def main(self) -> Op:
        """The operator, without its epilogue and the views of its inputs."""
        return self.stages[0].op

    @property
    def kinds(self) -> str:
        """`conv+batch_norm+relu`: its operators, for display."""
        return "+".join(stage.label for stage in self.stages)

    @property
    def whole(self) -> bool:
        """True if only its operator's results are known, so that it is not split."""
        return isinstance(self.main, TorchOp) and not self.main.free

    @property
    def end(self) -> bool:
        """True if it has no configuration to choose: an input, a constant or the sink."""
        return self.role in (Role.INPUT, Role.CONSTANT, Role.SINK)

    @property
    def trains(self) -> bool:
        """True if any of its parameters gets a gradient."""
        if self.role is Role.TIED:
            return self.name not in self.frozen
        return any(p.trainable for p in self.space.parameters)

    @property
    def remembered(self) -> list[tuple[str, Parameter, str]]:
        """The running statistics that training updates: the model's name, the description, the element type."""
        rows: list[tuple[str, Parameter, str]] = []
        for dtype, stage in zip(self.all_types.parameters, self.stages, strict=True):
            here = zip(self.parameters[stage.parameters], self.space.parameters[stage.parameters], strict=True)
            own = (p.trainable for p in stage.space.parameters)  # even if the layer's are frozen
            if stage.op.remembers:
                rows += [(name, p, dtype) for (name, p), trains in zip(here, own, strict=True) if not trains]
        return rows

    def gradients(self, flows: Sequence[bool]) -> tuple[StageGradients, ...]:
        """The gradients that each stage computes. flows: whether each of the layer's inputs needs one."""
        made: list[StageGradients] = []
        for stage in self.stages:
            inputs = any(flows[stage.inputs]) or (stage.epilogue and made[-1].result)
            trains = any(p.trainable for p in self.space.parameters[stage.parameters])
            made.append(StageGradients(inputs, inputs or trains))
        return tuple(made)

    def held(self) -> list[tuple[str, Parameter, int]]:
        """The parameters that live in this layer: the model's name, the description, and the bytes an element.

        A tied parameter lives in its own source layer, not in those that use it.
        """
        if self.role is Role.TIED:
            trainable = self.out.differentiable and self.trains
            return [(self.name, Parameter(self.name, self.out.shape, same(self.out), trainable), self.out.item_bytes)]
        stages = zip(self.all_types.parameters, self.stages, strict=True)
        item_bytes = [ITEM_BYTES[dtype] for dtype, stage in stages for _ in stage.space.parameters]
        rows = zip(self.parameters, self.space.parameters, item_bytes, strict=True)
        return [row for i, row in enumerate(rows) if i not in self.tied]

    def own_parameters(self) -> list[tuple[str, Parameter]]:
        """`held` without the bytes."""
        return [(name, parameter) for name, parameter, _ in self.held()]


@lru_cache(maxsize=65536)
def _untrained(where: Space, which: tuple[int, ...]) -> Space:
    """The space with parameters that are not trained. Cached like `space`, so that prices by space are shared."""
    parameters = (replace(p, trainable=p.trainable and i not in which) for i, p in enumerate(where.parameters))
    return replace(where, parameters=tuple(parameters))
