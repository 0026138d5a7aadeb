"""Measured times of layers, with their conditions, cells and spread; and the section `layers` of a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace

from layerwise.files import parse_json
from layerwise.machine.fields import Field, kind

Extents = tuple[int, ...]

# The arithmetic of a step. float16 and bf16 are mixed precision, like autocast's: parameters and their gradients stay
# float32. (Element types of tensors have PyTorch's names, such as "bfloat16".)
DTYPES = ("float64", "float32", "tf32", "float16", "bf16")
AUTOCAST = {"float16": "float16", "bf16": "bfloat16"}  # the 16-bit element types of mixed precision
_OTHER_NAMES = {"bfloat16": "bf16", "fp16": "float16", "half": "float16"}


def precision(name: str) -> str:
    """The name in `DTYPES` for other spellings: `bf16` for `bfloat16`. Other names are unchanged."""
    return _OTHER_NAMES.get(name, name)


@dataclass(frozen=True, slots=True)
class Conditions:
    """Everything that a time depends on beside the cell: times are compared and merged only under equal conditions."""

    device: str  # the hardware's own name
    torch: str  # its version
    dtype: str  # one of DTYPES
    tf32: str = "off"  # what uses TF32: off, conv, all
    channels_last: bool = False
    cudnn_benchmark: bool = False
    threads: int = 0  # threads of a kernel on a CPU; 0 on a GPU


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a cell in one direction, as the roofline sees it; times of unmeasured cells are fitted over it."""

    kernels: float = 0.0
    arithmetic_s: float = 0.0  # at the peak
    memory_s: float = 0.0  # at full bandwidth


@dataclass(frozen=True, slots=True)
class CellTime:
    """The measured time of a cell: medians."""

    forward_s: float
    backward_s: float
    spread: float  # range of the middle half of the samples, as a fraction of the median
    samples: int
    forward: Work = Work()
    backward: Work = Work()


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Times under one set of conditions.

    The update of parameters is an operator here, and so are the loss and the runtime's overhead for a layer and a step:
    `cost.compute.measured` has their names.
    """

    conditions: Conditions
    made: Mapping[str, str] = field(default_factory=dict, hash=False)  # when, by what, on what: for display
    # By the operator's signature and the cell's extents (`cost.compute.measured`).
    cells: Mapping[str, Mapping[Extents, CellTime]] = field(default_factory=dict, hash=False)
    # The fit's median relative error on cells that were held out; None if too few were measured.
    held_out_error: float | None = None

    @property
    def count(self) -> int:
        """The number of measured cells."""
        return sum(len(times) for times in self.cells.values())


VERSION = 1
TF32 = ("off", "conv", "all")
CELL = ("extents", "forward_s", "backward_s", "spread", "samples", "work")


def parse_layers(section: Field) -> tuple[LayerTimes, ...]:
    """All sets of times. Raises LayerwiseError that names the file and the path."""
    top = section.members(("version", "sets"))
    if top["version"].value != VERSION or isinstance(top["version"].value, bool):
        raise top["version"].error(f"this layerwise reads version {VERSION} only, found {kind(top['version'].value)}")
    sets = [_set(item) for item in top["sets"].items()]
    for i, one in enumerate(sets):
        if one.conditions in [other.conditions for other in sets[:i]]:
            raise section.error(f"sets[{i}] has the conditions of an earlier one")
    return tuple(sets)


def layers_as_json(sets: Sequence[LayerTimes]) -> dict[str, object]:
    """The section's value."""
    return {"version": VERSION, "sets": [_set_value(one) for one in sets]}


def _set(item: Field) -> LayerTimes:
    row = item.members(("conditions", "made", "operators"), ("held_out_error",))
    made = row["made"].members((), tuple(row["made"].value) if isinstance(row["made"].value, dict) else ())
    error = row["held_out_error"].plain_number() if "held_out_error" in row else None
    texts, cells = {name: f.text() for name, f in made.items()}, _cells(row["operators"])
    return LayerTimes(_conditions(row["conditions"]), texts, cells, error)


def _cells(operators: Field) -> dict[str, dict[Extents, CellTime]]:
    cells: dict[str, dict[Extents, CellTime]] = {}
    for operator in operators.items(least=0):
        row = operator.members(("operator", "cells"))
        name = _operator(row["operator"])
        if name in cells:
            raise row["operator"].error("appears twice")
        cells[name] = {}
        for cell in row["cells"].items():
            extents, time = _cell(cell)
            if extents in cells[name]:
                raise cell.error(f"the extents {list(extents)} appear twice")
            cells[name][extents] = time
    return cells


def _operator(item: Field) -> str:
    """The operator's name; a layer's is JSON that gives the kinds of its operator and epilogue."""
    name = item.text()
    if name.startswith("{"):
        named = parse_json(name, f"{item.document}: {item.path}")
        try:
            sound = all(
                isinstance(row["kind"], str) for row in (named["op"], *(f[0] for f in named.get("followers", ())))
            )
        except (KeyError, TypeError, IndexError, AttributeError):
            sound = False
        if not sound:
            raise item.error("expected a layer's operator and followers, each with its kind, as measure layers writes")
    return name


def _conditions(item: Field) -> Conditions:
    row = item.members(tuple(f.name for f in fields(Conditions)))
    return Conditions(
        device=row["device"].text(),
        torch=row["torch"].text(),
        dtype=replace(row["dtype"], value=precision(row["dtype"].text())).choice(DTYPES),
        tf32=row["tf32"].choice(TF32),
        channels_last=row["channels_last"].flag(),
        cudnn_benchmark=row["cudnn_benchmark"].flag(),
        threads=row["threads"].plain_whole(),
    )


def _cell(item: Field) -> tuple[Extents, CellTime]:
    row = item.members(CELL[:-1], CELL[-1:])
    extents = row["extents"].wholes()
    forward, backward, spread = (row[name].plain_number() for name in ("forward_s", "backward_s", "spread"))
    work = row["work"].plain_numbers(6) if "work" in row else (0.0,) * 6
    samples = row["samples"].plain_whole()
    return extents, CellTime(forward, backward, spread, samples, Work(*work[:3]), Work(*work[3:]))


def _set_value(one: LayerTimes) -> dict[str, object]:
    value: dict[str, object] = {"conditions": asdict(one.conditions), "made": dict(one.made)}
    if one.held_out_error is not None:
        value["held_out_error"] = one.held_out_error
    value["operators"] = [
        {"operator": name, "cells": [_cell_value(extents, time) for extents, time in times.items()]}
        for name, times in one.cells.items()
    ]
    return value


def _cell_value(extents: Extents, time: CellTime) -> dict[str, object]:
    work = [*asdict(time.forward).values(), *asdict(time.backward).values()]
    return {
        "extents": list(extents),
        "forward_s": _digits(time.forward_s),
        "backward_s": _digits(time.backward_s),
        "spread": round(time.spread, 4),
        "samples": time.samples,
        "work": [_digits(x) for x in work],
    }


def _digits(x: float) -> float:
    """Five digits; more are noise."""
    return float(f"{x:.5g}")
