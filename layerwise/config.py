"""Configurations of a layer: which are legal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd, prod
from typing import Literal, get_args

from layerwise.arguments import Count, checked, checked_values
from layerwise.errors import LayerwiseError
from layerwise.geometry import nests
from layerwise.ops.facts import Dim

ORDER = ("n", "c", "d", "h", "w", "l", "s", "k")  # in which degrees are written
NOT_DEGREES = ("placement", "recompute", "states", "weights")  # what a configuration has besides, as it is written
MAX_WEIGHT = 10_000
EVEN = {"c", "k"}  # whose cuts are even, whatever the weights, as those of DTensors are
REDUCE_ORDER = ("c", "n", "d", "h", "w", "l", "s")  # where a reduction's result may be scattered, first that has room

Placement = Literal["contiguous", "strided"]
States = Literal["replicated", "sharded", "gathered"]


@checked_values
@dataclass(frozen=True, slots=True)
class Config:
    """A configuration of a layer: its degrees of parallelism, where the cells go, and what saves memory.

    Attributes:
        degrees: (dimension label, degree) of every degree above 1; `Config.of` takes a mapping.
        placement: Cell i of P goes to device i ("contiguous": the fewest nodes), or to device i*N//P of N ("strided":
            spread over nodes).
        recompute: What the backward pass reads is not saved but recomputed, with the layer's block
            (`partition.blocks`): inputs are transferred once more, and the layer is computed once more.
        states: Of parameters that r devices replicate. "sharded": each has 1/r of the optimizer's state, updates that
            much, and gathers the rest (ZeRO-1). "gathered": each has 1/r of the parameters, too, which are gathered for
            the forward pass and for the backward pass (ZeRO-3).
        weights: Of unequal devices, what each gets in proportion; one of weight 0 has no cell. Cells are numbered along
            the others, and cuts of n, d, h, w, l and s are in the proportion of what lies on both sides. (): all equal.

    Examples:
        >>> config = Config.of({"n": 4, "c": 2})
        >>> print(config, config.total)
        {n=4, c=2} 8
    """

    degrees: tuple[tuple[str, int], ...] = ()
    placement: Placement = "contiguous"
    recompute: bool = False
    states: States = "replicated"
    weights: tuple[int, ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)  # many are looked up by it

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.__reduce__()[1]))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        parts = self.degrees, self.placement, self.recompute, self.states, self.weights
        return Config, parts  # hashes of strings differ elsewhere

    @staticmethod
    @checked
    def of(degrees: Mapping[str, int], placement: Placement = "contiguous") -> Config:
        """The configuration of a mapping; degrees of 1 may be named."""
        these = tuple((d, degrees[d]) for d in ORDER if degrees.get(d, 1) > 1)
        return _made(these, placement, False, "replicated", ())

    @property
    def total(self) -> int:
        """Devices used."""
        return prod(degree for _, degree in self.degrees)

    def __getitem__(self, label: str) -> int:
        return dict(self.degrees).get(label, 1)

    @property
    def cells(self) -> Config:
        """The configuration without the choices that save memory: who computes what."""
        return self.saving(recompute=False, states="replicated")

    def saving(self, *, recompute: bool, states: States) -> Config:
        """The configuration with these choices that save memory."""
        same = recompute == self.recompute and states == self.states
        return self if same else _made(self.degrees, self.placement, recompute, states, self.weights)

    def weighted(self, weights: tuple[int, ...]) -> Config:
        """The configuration on unequal devices: with the weights that say the same in the smallest numbers."""
        some = [w for w in weights if w]
        divisor = some[0] if len(set(some)) == 1 else gcd(*some)
        weights = tuple(w // divisor for w in weights)
        if len(some) == self.total and weights[: len(some)] == (1,) * len(some):  # equal ones, on the first devices
            weights = ()
        return replace(self, placement="contiguous", weights=weights)

    @property
    def uneven(self) -> bool:
        """Whether devices with a cell differ in weight."""
        return len(set(self.weights) - {0}) > 1

    @property
    def marks(self) -> tuple[str, ...]:
        """The choices beside degrees: `("strided", "recompute", "sharded")`."""
        said = [(self.placement, "contiguous"), ("recompute" * self.recompute, ""), (self.states, "replicated")]
        said.append((":".join(map(str, self.weights)), ""))
        return tuple(word for word, default in said if word != default)

    def __str__(self) -> str:
        return "/".join(["{" + ", ".join(f"{d}={v}" for d, v in self.degrees) + "}", *self.marks])


def fewer(weights: tuple[int, ...], devices: int) -> tuple[int, ...]:
    """These weights of so many devices, those that do most (of equal ones the first), and 0 of the others."""
    kept = set(sorted(range(len(weights)), key=lambda i: -weights[i])[:devices])
    return tuple(w if i in kept else 0 for i, w in enumerate(weights))


_made = lru_cache(1 << 16)(Config)  # a search asks for the same ones over and over, and compares them


def distinct_cells(configs: Sequence[Config]) -> tuple[tuple[Config, ...], list[int]]:
    """Configurations without the choices that save memory, each once, and which of these each one is."""
    return _distinct(tuple(configs))


@lru_cache(256)
def _distinct(configs: tuple[Config, ...]) -> tuple[tuple[Config, ...], list[int]]:
    if len(set(configs)) == len(configs) and all(config.cells is config for config in configs):
        return configs, list(range(len(configs)))
    numbers: dict[Config, int] = {}
    of = [numbers.setdefault(config.cells, len(numbers)) for config in configs]
    return tuple(numbers), of


@checked
@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The configurations that a search chooses from.

    Attributes:
        devices: How many there are.
        dims: Labels of the dimensions that may be split; "k" splits reductions, too.
        powers_of_two: Degrees are powers of two, else all divisors of `devices`.
        spread: Configurations on fewer devices are tried strided, too, as several nodes make worthwhile.
        replicas: Groups of devices, one after another, each of which computes samples of its own in every layer that
            has a sample dimension: it is split into a multiple of so many parts, and no tensor leaves its group.
        fixed: Layers that keep a configuration, by name (`search.baselines.fixed_layers`).
        weights: Of unequal devices, the vectors of weights that every layer may have beside equal ones
            (`CostModel.weights`), on any number of devices: those that do most. (): equal ones alone. None: those of
            the model.

    Examples:
        >>> from layerwise.ops.facts import Dim
        >>> [str(config) for config in SearchSpace(2, dims=("n", "c")).configurations((Dim("n", 8), Dim("c", 6)))]
        ['{}', '{c=2}', '{n=2}']
    """

    devices: Count
    dims: tuple[str, ...] = ("n", "c", "d", "h", "w", "l", "s")  # that may be split
    powers_of_two: bool = False  # the only degrees; else all divisors of `devices`
    spread: bool = False  # also try a configuration on fewer devices strided: worthwhile where there are several nodes
    replicas: Count = 1
    fixed: tuple[tuple[str, Config], ...] = ()
    weights: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if any(len(vector) != self.devices for vector in self.weights or ()):
            raise LayerwiseError(f"weights are vectors of {self.devices} numbers, one a device")
        if self.weights and self.replicas > 1:
            raise LayerwiseError("replicas are of equal devices: leave them out where devices are unequal")
        if self.replicas < 1 or self.devices % self.replicas:
            raise LayerwiseError(f"{self.devices} devices cannot be {self.replicas} replicas of equally many")

    def configurations(self, dims: tuple[Dim, ...]) -> tuple[Config, ...]:
        """All legal configurations of a layer with these dimensions; the serial one first."""
        scatters = "k" in self.dims  # over which dimension depends on their extents
        most = (d.max_degree if scatters else min(d.max_degree, self.devices) for d in dims)
        return _configurations(self, tuple(Dim(d.label, extent) for d, extent in zip(dims, most, strict=True)))

    def crosses(self, config: Config, dims: Sequence[Dim]) -> bool:
        """Whether devices of several replicas share a sample of a layer with these dimensions.

        Cells of samples are outermost, so that those of a replica are one after another; where they are fewer than
        devices, they are its own devices' if they are strided. Cells of unlike sizes, of a batch that devices do not
        divide, may differ by a sample from layer to layer: that one is sent.
        """
        if self.replicas == 1 or all(d.max_degree < self.replicas for d in dims if d.label == "n"):
            return False
        apart = config.total == self.devices or config.placement == "strided"
        return not apart or config["n"] % self.replicas > 0

    def check(self, config: Config, dims: Sequence[Dim], layer: str) -> None:
        """LayerwiseError where it crosses."""
        if self.crosses(config, dims):
            raise LayerwiseError(
                f"layer {layer!r}: {config} has samples in common for the {self.replicas} replicas: split n into "
                f"{self.replicas} or a multiple of it, over all {self.devices} devices or strided"
            )


@lru_cache(maxsize=4096)
def _configurations(space: SearchSpace, dims: tuple[Dim, ...]) -> tuple[Config, ...]:
    labels = [d.label for d in dims if d.label in space.dims]
    divisors = [d for d in range(1, space.devices + 1) if space.weights or space.devices % d == 0]
    if space.powers_of_two:
        divisors = [d for d in divisors if d & (d - 1) == 0]
    result = []
    for total in divisors:
        for split in _factorisations(total, len(labels)):
            config = Config.of({str(label): degree for label, degree in zip(labels, split, strict=True)})
            if config.total == total and is_legal(config, dims):
                result.append(config)
                if (space.spread or space.replicas > 1) and 1 < total < space.devices:
                    result.append(Config.of(dict(config.degrees), "strided"))
                result += dict.fromkeys(_weighted(config, space.weights or (), dims))
    return tuple(config for config in result if not space.crosses(config, dims))


def _weighted(config: Config, vectors: Sequence[tuple[int, ...]], dims: Sequence[Dim]) -> Iterator[Config]:
    """A configuration with each of the weights, and on the devices that do most with equal ones."""
    for vector in vectors:
        most = fewer(vector, config.total)
        for weights in (tuple(int(w > 0) for w in most), most):
            found = config.weighted(weights)
            full = sum(w > 0 for w in found.weights) == found.total
            if full and is_legal(found, dims) and not (found.uneven and set(dict(config.degrees)) <= EVEN):
                yield found


def _factorisations(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ordered ways to write `total` as a product of `parts` factors."""
    if parts == 0:
        if total == 1:
            yield ()
        return
    for first in range(1, total + 1):
        if total % first == 0:
            for rest in _factorisations(total // first, parts - 1):
                yield (first, *rest)


def is_legal(config: Config, dims: Sequence[Dim]) -> bool:
    """True if a layer with these dimensions can be split so."""
    return why_illegal(config, dims) is None


def why_illegal(config: Config, dims: Sequence[Dim]) -> str | None:
    """The reason that a layer with these dimensions cannot be split so, or None."""
    most = {d.label: d.max_degree for d in dims if d.label}
    for label, degree in config.degrees:
        if label not in most:
            possible = ", ".join(str(r) for r in most) or "none"
            return f"cannot be split along {label!r} (its dimensions: {possible})"
        if degree > most[label]:
            return f"{label}={degree} is more than the {most[label]} parts it can be cut into"
    if config["k"] > 1 and config.uneven:
        return f"k={config['k']} is cut among devices of equal weight only"
    if config["k"] > 1 and reduce_axis(config, dims) is None:
        return f"k={config['k']} leaves no dimension with room to scatter the sums over"
    return None


def reduce_axis(config: Config, dims: Sequence[Dim]) -> int | None:
    """The output dimension whose cells are cut once more by the reduce-scatter over k; None: none can be (illegal)."""
    axes = {d.label: i for i, d in enumerate(dims) if d.label}
    for label in REDUCE_ORDER:
        if label in axes:
            most, degree = dims[axes[label]].max_degree, config[label]
            if most >= degree * config["k"] and nests(most, degree, config["k"]):
                return axes[label]
    return None


def parse(degrees: object, dims: Sequence[Dim], devices: int, layer: str) -> Config:
    """A hand-written configuration `{"n": 4, "placement": "strided", "recompute": true, "states": "sharded"}`.

    LayerwiseError where it cannot be.
    """
    if not isinstance(degrees, Mapping):
        raise LayerwiseError(f"layer {layer!r}: a configuration is a mapping such as {{'n': 4}}, not {degrees!r}")
    placement = degrees.get("placement", "contiguous")
    if placement not in ("contiguous", "strided"):
        raise LayerwiseError(f"layer {layer!r}: placement is 'contiguous' or 'strided', not {placement!r}")
    recompute, states = degrees.get("recompute", False), degrees.get("states", "replicated")
    if not isinstance(recompute, bool):
        raise LayerwiseError(f"layer {layer!r}: recompute is true or false, not {recompute!r}")
    if states not in get_args(States):
        raise LayerwiseError(f"layer {layer!r}: states is one of {', '.join(get_args(States))}, not {states!r}")
    for label, degree in degrees.items():
        if label in NOT_DEGREES:
            continue
        sound = label in ORDER and isinstance(degree, int) and not isinstance(degree, bool) and degree >= 1
        if not sound:
            wanted = f"a dimension ({', '.join(ORDER)}) and a degree >= 1"
            raise LayerwiseError(f"layer {layer!r}: {label!r}: {degree!r} is not {wanted}")
    config = Config.of({k: v for k, v in degrees.items() if k not in NOT_DEGREES}, placement)
    if "weights" in degrees:
        if placement != "contiguous":
            raise LayerwiseError(f"layer {layer!r}: weights are of devices one after another: leave out the placement")
        config = config.weighted(parse_weights(degrees["weights"], devices, f"layer {layer!r}"))
    check(config, dims, devices, layer)
    if config.total in (1, devices):
        config = replace(config, placement="contiguous")
    return replace(config, recompute=recompute, states=states)


def parse_weights(value: object, devices: int, what: str) -> tuple[int, ...]:
    """Weights as they are written: a whole number a device, not all of them 0. LayerwiseError for anything else."""
    numbers = value if isinstance(value, list | tuple) else ()
    if len(numbers) != devices or any(type(w) is not int or not 0 <= w <= MAX_WEIGHT for w in numbers):
        raise LayerwiseError(
            f"{what}: weights are {devices} whole numbers from 0 to {MAX_WEIGHT:,}, one a device, not {value!r}"
        )
    if not any(numbers):
        raise LayerwiseError(f"{what}: weights of 0 leave every device without a box")
    return tuple(numbers)


def check(config: Config, dims: Sequence[Dim], devices: int, layer: str) -> None:
    """LayerwiseError where a layer with these dimensions cannot be split so over these devices."""
    reason = why_illegal(config, dims)
    if reason is None and config.weights and config.total != (having := sum(w > 0 for w in config.weights)):
        reason = f"{config} has {config.total} boxes, and its weights give {having} devices one"
    if reason is None and config.total > devices:
        reason = f"{config} needs {config.total} devices, there are {devices}"
    if reason:
        raise LayerwiseError(f"layer {layer!r}: {reason}")


def check_choices(config: Config, layer: str, *, differentiated: bool) -> None:
    """LayerwiseError where a layer cannot save memory as its configuration says.

    differentiated: whether a gradient flows back through what it computes (`LayerGraph.differentiates`).
    """
    if config.recompute and not differentiated:
        raise LayerwiseError(f"layer {layer!r}: nothing of it is kept for a backward pass: leave recompute out")
