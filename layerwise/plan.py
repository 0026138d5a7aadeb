"""Plan: a strategy made executable, as versioned JSON: all that passes from the search to the runtime."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any, Literal

from layerwise.arguments import Count, checked
from layerwise.config import NOT_DEGREES, Config, check_choices, parse, parse_weights
from layerwise.errors import LayerwiseError, nearest
from layerwise.files import parse_json, read_json, write_text
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.facts import Dim
from layerwise.partition.buckets import BUCKET_BYTES
from layerwise.partition.sharding import check_held
from layerwise.quantities import samples
from layerwise.report.content import Column, Lines, Table, filled
from layerwise.report.html import fragment
from layerwise.tensor import LABELS

FORMAT, VERSION = "layerwise-plan", 3
READABLE = (1, 2, VERSION)  # 1 knows neither recompute nor states, 2 no weights
MAX_BATCH = 2**30  # samples a step; beyond, counts of bytes would leave 64 bits


@checked
@dataclass(frozen=True, slots=True)
class Plan:
    """A strategy with all that the runtime needs of it: what passes from the search to the runtime, as JSON.

    Attributes:
        model: The model as given on the command line.
        digest: Of the fused graph at `batch` samples.
        batch: Samples a step of all devices together.
        gpus: Devices.
        gpus_per_node: Devices a node.
        io: What each device is fed: its samples, the whole batch ("free"), or the boxes that it needs.
        fused: Whether the layers are those of `fuse`.
        strategy: The configuration of every layer but inputs and sink.
        device_order: The rank that is each of the planned devices.
        predicted: Seconds and bytes of a step.
        provenance: Versions, profile, options and proof of the search.
        predicted_layers: Seconds of each layer's parts (compute_s, transfers_s, sync_s, statistics_s), where known.
        bucket_bytes: At which a bucket of gradients is full and is summed; older plans have 25 MiB.
        shares: Of unequal devices, the weights by which they feed their parts of a batch. (): equal parts.

    Examples:
        >>> plan = Plan("lenet5", "", 64, 2, 2, "sample", True, {"fc1": Config.of({"c": 2})})
        >>> plan.strategy["fc1"].total, plan.device_order
        (2, (0, 1))
    """

    model: str
    digest: str
    batch: Count
    gpus: Count
    gpus_per_node: Count
    io: Literal["sample", "free", "boxes"]
    fused: bool
    strategy: Mapping[str, Config]
    device_order: tuple[int, ...] = ()
    predicted: Mapping[str, float] = field(default_factory=dict)
    provenance: Mapping[str, object] = field(default_factory=dict)
    predicted_layers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    bucket_bytes: Count = BUCKET_BYTES
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.device_order:
            object.__setattr__(self, "device_order", tuple(range(self.gpus)))

    def dumps(self) -> str:
        """The file's text: stable, readable, one line a layer."""
        weighted = self.shares or any(config.weights for config in self.strategy.values())
        body: dict[str, object] = {"format": FORMAT, "version": VERSION if weighted else 2}
        body |= {f.name: getattr(self, f.name) for f in fields(self) if f.name != "strategy"}
        if self.bucket_bytes == BUCKET_BYTES:
            del body["bucket_bytes"]
        if not self.shares:
            del body["shares"]
        strategy = {name: as_json(config) for name, config in self.strategy.items()}
        body["checksum"] = checksum({**body, "strategy": strategy})
        head = json.dumps(body, indent=1, default=list, allow_nan=False)
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(config)}" for name, config in strategy.items())
        return head.removesuffix("\n}") + ',\n "strategy": {\n' + rows + "\n }\n}\n"

    @checked
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan, whole or not at all."""
        write_text(path, self.dumps())

    def _repr_html_(self) -> str:
        rows = [(title, str(config) if config.total > 1 else "one device") for title, config in _runs(self.strategy)]
        table = Table(filled([Column("layers"), Column("configuration")], rows))
        about = Lines([f"{self.model} on {self.gpus} devices, {samples(self.batch)} a step"])
        return fragment([about, table])

    @property
    def shared(self) -> list[str] | None:
        """The inputs that are the same for all samples, by name, where the plan says so."""
        shared = self.provenance.get("shared")
        return shared if isinstance(shared, list) else None

    @property
    def together(self) -> bool:
        """Whether layers may compute samples together."""
        return bool(self.provenance.get("together"))

    def layers(self, network: LayerGraph) -> LayerGraph:
        """The layers that the plan is for: fused, where it says so."""
        return fuse(network) if self.fused else network

    def check(self, graph: LayerGraph, world_size: int | None = None) -> None:
        """LayerwiseError unless this plan is for `graph` (as `layers` makes it, at its batch) on that many ranks."""
        if world_size is not None and world_size != self.gpus:
            raise LayerwiseError(
                f"the plan is for {self.gpus} ranks, there are {world_size}: start as many, or search again"
            )
        names = {layer.name for layer in graph.inner}
        if names != set(self.strategy):
            odd = sorted(names ^ set(self.strategy))[0]
            raise LayerwiseError(f"the plan is for another model: layer {odd!r} is only in one of them")
        if graph.batch != self.batch:
            raise LayerwiseError(
                f"the plan is for a global batch of {self.batch}, here it is {graph.batch}: give the model that batch, "
                "or search again"
            )
        if graph.digest != self.digest:
            raise LayerwiseError(
                f"the plan is for another model: {self.model!r} had digest {self.digest[:12]}, this one has "
                f"{graph.digest[:12]} (same layer names, other operators or shapes): search again"
            )
        for name, config in self.strategy.items():
            parse(as_json(config), graph[name].space.dims, self.gpus, name)
            check_held(graph[name], config)
            check_choices(config, name, differentiated=graph.differentiates(graph[name]))


@checked
def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Returns the plan in a file. Whether it fits a model says `Plan.check`.

    Args:
        path: A file of `Plan.save`, `layerwise search --out` or `parallelize(...).plan.save`.

    Returns:
        The plan. No code of the file is run.

    Raises:
        LayerwiseError: The file cannot be read, or is not a sound plan.

    Examples:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile(suffix=".json") as file:
        ...     Plan("lenet5", "", 64, 2, 2, "sample", True, {"fc1": Config.of({"c": 2})}).save(file.name)
        ...     load_plan(file.name).gpus
        2
    """
    return _plan(read_json(path, "plan"), f"plan {os.fspath(path)!r}")


def parse_plan(text: str, where: str) -> Plan:
    """A plan from the text that `Plan.dumps` makes. `where` is how errors call it."""
    return _plan(parse_json(text, where), where)


def _plan(value: object, where: str) -> Plan:
    raw = _object(value, where)
    if raw.get("format") != FORMAT:
        raise LayerwiseError(f"{where} is not a layerwise plan (its 'format' is {raw.get('format')!r})")
    if isinstance(raw.get("version"), bool) or raw.get("version") not in READABLE:
        read = f"{', '.join(map(str, READABLE[:-1]))} and {READABLE[-1]}"
        raise LayerwiseError(f"{where} has version {raw.get('version')!r}; this layerwise reads versions {read}")
    for key, kind in (("model", str), ("digest", str), ("io", str), ("fused", bool)):
        if not isinstance(raw.get(key), kind):
            raise LayerwiseError(f"{where}: {key!r} must be a {kind.__name__}, not {raw.get(key)!r}")
    for key in ("batch", "gpus", "gpus_per_node"):
        if not isinstance(raw.get(key), int) or isinstance(raw[key], bool) or raw[key] < 1:
            raise LayerwiseError(f"{where}: {key!r} must be a whole number of at least 1, not {raw.get(key)!r}")
        if key == "batch" and raw[key] > MAX_BATCH:
            raise LayerwiseError(f"{where}: {key!r} must be at most {MAX_BATCH:,}, not {str(raw[key])[:40]}")
    if raw["io"] not in ("sample", "free", "boxes"):
        raise LayerwiseError(f"{where}: 'io' must be 'sample', 'free' or 'boxes', not {raw['io']!r}")
    order = raw.get("device_order")
    sound = isinstance(order, list) and len(order) == raw["gpus"] and all(type(rank) is int for rank in order)
    if not isinstance(order, list) or not sound or sorted(order) != list(range(raw["gpus"])):
        raise LayerwiseError(f"{where}: 'device_order' must name each of the {raw['gpus']} ranks once")
    predicted = _numbers(raw.get("predicted"), f"{where}: 'predicted'")
    layers = _object(raw.get("predicted_layers", {}), f"{where}: 'predicted_layers'")  # older plans have none
    predicted_layers = {name: _numbers(times, f"{where}: predicted_layers {name!r}") for name, times in layers.items()}
    strategy = {
        name: parse(degrees, _anything(degrees), raw["gpus"], name)
        for name, degrees in _object(raw.get("strategy"), f"{where}: 'strategy'").items()
    }
    provenance = _provenance(raw.get("provenance"), f"{where}: 'provenance'")
    if raw.get("halos_sent"):
        raise LayerwiseError(f"{where} sends halos of its inputs, which are read now: search again")
    bucket_bytes = raw.get("bucket_bytes", BUCKET_BYTES)
    if type(bucket_bytes) is not int or bucket_bytes < 1:
        raise LayerwiseError(f"{where}: 'bucket_bytes' must be a whole number of at least 1, not {bucket_bytes!r}")
    shares = parse_weights(raw["shares"], raw["gpus"], f"{where}: 'shares'") if "shares" in raw else ()
    if raw.pop("checksum", None) != checksum(raw):
        raise LayerwiseError(
            f"{where} was altered since it was written: search again (a strategy of your own can be priced with "
            "layerwise search --price)"
        )
    return Plan(
        **{name: raw[name] for name in ("model", "digest", "batch", "gpus", "gpus_per_node", "io", "fused")},
        strategy=strategy,
        device_order=tuple(order),
        predicted=predicted,
        provenance=provenance,
        predicted_layers=predicted_layers,
        bucket_bytes=bucket_bytes,
        shares=shares,
    )


def checksum(body: Mapping[str, object]) -> str:
    """SHA-256 of a plan's other members, as they stand in the file."""
    return hashlib.sha256(json.dumps(body, default=list).encode()).hexdigest()


def as_json(config: Config) -> dict[str, Any]:
    """`{"n": 4, "placement": "strided", "recompute": true}`: of what is not a degree only what is not the default."""
    degrees: dict[str, Any] = dict(config.degrees)
    default = Config()
    return degrees | {k: v for k in NOT_DEGREES if (v := getattr(config, k)) != getattr(default, k)}


def parse_strategy(value: object, graph: LayerGraph, devices: int) -> dict[str, Config]:
    """A hand-written strategy: `{layer: {dim: degree}}`, or whatever holds one under "strategy" (a plan, `--json`)."""
    raw = _object(value, "a strategy")
    placements = _object(raw.get("placements", {}), "'placements'")
    if isinstance(raw.get("strategy"), dict):
        raw = raw["strategy"]
    by_name = {layer.name: layer for layer in graph.inner}
    for name in (*raw, *placements):
        if name not in by_name:
            raise LayerwiseError(
                f"the strategy names layer {name!r}, which the model does not have{nearest(name, by_name)}"
            )
    missing = [name for name in by_name if name not in raw]
    if missing:
        raise LayerwiseError(
            f"the strategy has no configuration for layer {missing[0]!r} ({len(missing)} missing in all)"
        )
    result = {}
    for name, layer in by_name.items():
        degrees = raw[name]
        if name in placements and isinstance(degrees, dict):
            degrees = degrees | {"placement": placements[name]}
        result[name] = parse(degrees, layer.space.dims, devices, name)
        check_held(layer, result[name])
    return result


def _anything(degrees: object) -> list[Dim]:
    """Dimensions of a layer that is not known yet: any label, as much room as asked for."""
    labels = degrees if isinstance(degrees, Mapping) else {}
    return [Dim(str(label), 2**40) for label in labels if label not in NOT_DEGREES] + [Dim("n", 2**40)]


def _provenance(value: object, where: str) -> dict[str, Any]:
    """The facts of how the plan was made. LayerwiseError where one that is read back is of another type."""
    facts = _object(value, where)
    sound = {
        "profile": isinstance(facts.get("profile", ""), str),
        "powers_of_two": isinstance(facts.get("powers_of_two", False), bool),
        "together": isinstance(facts.get("together", False), bool),
        "shared": _list_of(str, facts.get("shared", [])),
        "dims": _list_of(str, facts.get("dims", [])) and set(facts.get("dims", [])) <= {*LABELS, "k"},
        "input_shape": facts.get("input_shape") is None
        or (_list_of(int, facts["input_shape"]) and min(facts["input_shape"], default=1) > 0),
        "cost_options": isinstance(facts.get("cost_options", {}), dict)
        and all(isinstance(option, str | bool) for option in facts.get("cost_options", {}).values()),
        "mixed_precision": _types(facts.get("mixed_precision")),
    }
    for key, fine in sound.items():
        if not fine:
            raise LayerwiseError(f"{where}: {key!r} cannot be {str(facts[key])[:40]!r}: search again")
    return facts


def _types(value: object) -> bool:
    """True if this is what a plan says of mixed precision."""
    if value is None:
        return True
    sixteen = (None, "bfloat16", "float16")
    return isinstance(value, dict) and value.get("autocast") in sixteen and value.get("device") in ("cpu", "cuda")


def _list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _numbers(value: object, where: str) -> dict[str, float]:
    numbers = _object(value, where)
    for key, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= sys.float_info.max:
            raise LayerwiseError(f"{where}: {key!r} must be a finite number of at least 0, not {number!r}")
    return numbers


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise LayerwiseError(f"{where} must be a JSON object, not {type(value).__name__}")
    return value


def _runs(strategy: Mapping[str, Config]) -> list[tuple[str, Config]]:
    """Neighbouring layers of one configuration: `first … last`."""
    result = []
    for config, group in groupby(strategy.items(), key=lambda item: item[1]):
        names = [name for name, _ in group]
        result.append((names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}", config))
    return result
