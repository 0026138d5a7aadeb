"""Profiles as files: built in (`layerwise.profiles`) or a user's; `profiles/README.md` describes their JSON."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from layerwise.arguments import checked
from layerwise.errors import LayerwiseError
from layerwise.files import parse_json, write_text
from layerwise.machine.catalogue import BUILT_IN, composed, devices, is_composed
from layerwise.machine.curves import parse_links
from layerwise.machine.devices import Processor, Tile
from layerwise.machine.fields import Field
from layerwise.machine.layer_times import DTYPES, layers_as_json, parse_layers, precision
from layerwise.machine.profile import BACKENDS, Link, LinkLevel, Profile

DEFAULT = "h100"


def folder() -> Path:
    """The folder of measured profiles: $LAYERWISE_CACHE, else layerwise in the user's cache.

    A user without a home, as in a container, has one among temporary files. Raises LayerwiseError if somebody else has
    created it.
    """
    if named := os.environ.get("LAYERWISE_CACHE"):
        return Path(named)
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home) / "layerwise"
    try:
        return Path.home() / ".cache" / "layerwise"
    except RuntimeError:
        place = Path(tempfile.gettempdir()) / f"layerwise-{os.getuid()}"
        with contextlib.suppress(OSError):  # if it cannot be created, whoever writes there reports that
            place.mkdir(mode=0o700)
        status = place.lstat() if os.path.lexists(place) else None
        if status and (not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022):
            reason = "is a link, or others may write into it: set LAYERWISE_CACHE to your own folder"
            raise LayerwiseError(f"the cache's folder {os.fspath(place)!r} {reason}") from None
        return place


def names() -> list[str]:
    """The built-in profiles."""
    files = [file.name for file in resources.files(BUILT_IN).iterdir()]
    return sorted(file.removesuffix(".json") for file in files if file.endswith(".json"))


@checked
def load(name_or_path: str | os.PathLike[str] = DEFAULT) -> Profile:
    """Returns a built-in profile by name, a machine composed of a device and links, or the profile in a file.

    Args:
        name_or_path: "h100", "p100", ... (`names()`); a device of `layerwise machines`, with its links if they matter,
            such as "a100-80,link=200Gb/s"; or a file that `layerwise measure` has written.

    Returns:
        The profile; `Profile.device_graph(gpus)` is a machine with this number of devices.

    Raises:
        LayerwiseError: There is no such profile (it lists the nearest names), or the file is not a valid profile (it
            gives the field's path).

    Examples:
        >>> load("p100").device_graph(8).count
        8
    """
    given, built_in = os.fspath(name_or_path), names()
    if given in built_in:
        return parse((resources.files(BUILT_IN) / f"{given}.json").read_text(encoding="utf-8"), f"{given}.json")
    if is_composed(given, built_in):
        return parse(composed(given), f"of {given}")
    path = Path(given)
    if not path.suffix and path.name == given and not os.path.exists(given):  # noqa: PTH110 (Path.exists raises for long names)
        name = given.lower().partition(",")[0]
        begun = ([other for other in known if name and other.startswith(name)] for known in (built_in, devices()))
        near = next(filter(None, begun), None) or difflib.get_close_matches(name, [*built_in, *devices()], n=3)
        meant = f"did you mean {' or '.join(near)}? Built in are" if near else "built in are"
        raise LayerwiseError(
            f"unknown profile {given!r}: {meant} {', '.join(built_in)} and the devices of `layerwise machines`; "
            "anything else must be the path of a file"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise LayerwiseError(f"profile {given}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # not UTF-8, or a path with a NUL
        raise LayerwiseError(f"profile {given!r}: not a text file: {error}") from error
    return parse(text, given)


def planned(named: str, given: str | None) -> Profile:
    """The profile that a plan names, or `given`, which the user passes for it.

    A plan is data and may come from anybody: raises LayerwiseError if it names a file that the user does not name too.
    """
    if given is None and named not in names() and not is_composed(named, names()):
        raise LayerwiseError(
            f"the plan was found with profile {named!r}, a file that a plan may not open: pass it with --profile"
        )
    return load(given or named)


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Writes a profile to a file, atomically.

    Raises LayerwiseError if `load` would not accept the file, or it cannot be written.
    """
    text = write(profile)
    parse(text, os.fspath(path))
    write_text(path, text)


FORMAT = "layerwise-profile"
VERSION = 2  # 1 has devices of one kind
DEVICE = ("name", "memory_bytes", "memory_bandwidth_bytes_per_s", "peak_flops", "processors", "tiles", "kernel_floor_s")
LINK = ("name", "latency_s", "bandwidth_bytes_per_s")


def parse(text: str, file: str) -> Profile:
    """The profile that a file's text describes. `file` names it in errors (always LayerwiseError)."""
    document = parse_json(text, f"profile {file}")
    root = Field(f"profile {file}", "", document)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise root.error(f'not a profile of layerwise: it must be an object with "format": "{FORMAT}"')
    version = document.get("version")
    if version not in (1, VERSION) or not isinstance(version, int) or isinstance(version, bool):
        raise root.error(f"version: this layerwise reads versions 1 and {VERSION}, found {json.dumps(version)[:40]}")
    required = ("format", "version", "name", "description", "device", "levels")
    optional = ("backend", "other_links", "links", "layers", *(("kind_of", "other_devices") if version > 1 else ()))
    top = root.members(required, optional)
    processor = _processor(top["device"])
    return Profile(
        name=top["name"].text(),
        description=top["description"].text(),
        processor=processor,
        levels=_levels(top["levels"]),
        sources=root.sources,
        other_links=tuple(_link(item) for item in top["other_links"].items()) if "other_links" in top else (),
        layers=parse_layers(top["layers"]) if "layers" in top else (),
        links=parse_links(top["links"]) if "links" in top else None,
        backend=top["backend"].choice(BACKENDS) if "backend" in top else BACKENDS[0],
        **(_kinds(processor, top["other_devices"], root.member("kind_of")) if "other_devices" in top else {}),
    )


def write(profile: Profile) -> str:
    """The file's text, which `parse` reads back as an equal profile. A number and its source share a line."""

    def number(path: str, value: float | str) -> dict[str, object]:
        assert path in profile.sources, f"profile {profile.name}: no source for {path}"
        return {"value": value, "source": profile.sources[path]}

    def numbers(path: str, record: object, fields: Sequence[str]) -> dict[str, object]:
        values = {field: getattr(record, field) for field in fields}
        return {field: number(f"{path}.{field}", value) for field, value in values.items() if value is not None}

    def device(path: str, processor: Processor) -> dict[str, object]:
        row: dict[str, object] = {"name": processor.name}
        row |= numbers(path, processor, ("memory_bytes", "memory_bandwidth_bytes_per_s"))
        row["peak_flops"] = {d: number(f"{path}.peak_flops.{d}", v) for d, v in processor.peak_flops.items()}
        row |= numbers(path, processor, ("processors", "kernel_floor_s"))
        tiles = enumerate(processor.tiles)
        row["tiles"] = [numbers(f"{path}.tiles[{i}]", tile, ("rows", "columns", "efficiency")) for i, tile in tiles]
        return row

    document: dict[str, object] = {"format": FORMAT, "version": VERSION if profile.kinds else 1}
    about = {"name": profile.name, "description": profile.description}
    document |= about | {"device": device("device", profile.processor)}
    if profile.kinds:
        document["kind_of"] = list(profile.kind_of)
        others = enumerate(profile.kinds[1:])
        document["other_devices"] = [device(f"other_devices[{i}]", processor) for i, processor in others]
    if profile.backend != BACKENDS[0]:
        document["backend"] = profile.backend
    document["levels"] = [
        {"name": level.name} | numbers(f"levels[{i}]", level, ("devices", *LINK[1:], "devices_per_port"))
        for i, level in enumerate(profile.levels)
    ]
    if profile.other_links:
        document["other_links"] = [
            {"name": link.name} | numbers(f"other_links[{i}]", link, LINK[1:])
            for i, link in enumerate(profile.other_links)
        ]
    if profile.links is not None:
        document["links"] = profile.links.as_json()
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    text = re.sub(r'\{\s+("value": .*),\s+("source": .*)\s+\}', r"{\1, \2}", text)
    text = re.sub(r"\[\s+([\d.e+-]+),\s+([\d.e+-]+)\s+\]", r"[\1, \2]", text)  # the knots of a curve
    if profile.layers:
        text = text.removesuffix("\n}") + ',\n "layers": ' + _a_line_a_cell(layers_as_json(profile.layers)) + "\n}"
    return text + "\n"


def _a_line_a_cell(section: dict[str, object]) -> str:
    """The measured times as text, a line for each cell: there are thousands."""
    text = json.dumps(section, indent=1, ensure_ascii=False, allow_nan=False).replace("\n", "\n ")
    return re.sub(r'\{\s+"extents": [^{}]*\}', lambda cell: json.dumps(json.loads(cell[0])), text)


def _processor(device: Field) -> Processor:
    row = device.members(DEVICE)
    peaks = {
        precision(name): replace(peak, path=f"{device.path}.peak_flops.{precision(name)}")
        for name, peak in row["peak_flops"].members(("float32",), (*DTYPES, "bfloat16")).items()
    }
    tiles = []
    for item in row["tiles"].items():
        tile = item.members(("rows", "columns", "efficiency"))
        efficiency = tile["efficiency"].number()
        if efficiency > 1:
            raise tile["efficiency"].error(f"expected a share of the peak, at most 1, found {efficiency}")
        tiles.append(Tile(tile["rows"].whole(), tile["columns"].whole(), efficiency))
    return Processor(
        name=row["name"].text(),
        memory_bytes=row["memory_bytes"].whole(),
        memory_bandwidth_bytes_per_s=row["memory_bandwidth_bytes_per_s"].number(),
        peak_flops={dtype: peaks[dtype].number() for dtype in DTYPES if dtype in peaks},
        processors=row["processors"].whole(),
        tiles=tuple(tiles),
        kernel_floor_s=row["kernel_floor_s"].number(),
    )


def _kinds(first: Processor, others: Field, kind_of: Field) -> dict[str, Any]:
    """The kinds of devices, and which each device is. LayerwiseError where they do not go together."""
    kinds, numbers = (first, *map(_processor, others.items())), kind_of.wholes()
    if set(numbers) != set(range(len(kinds))) or numbers[0] != 0:
        raise kind_of.error(
            f"expected of each device its kind, 0 (device) to {len(kinds) - 1} (of other_devices), each at least once "
            "and 0 first"
        )
    if len({processor.name for processor in kinds}) < len(kinds):
        raise others.error("two kinds of devices have one name, by which measured times are told apart")
    return {"kinds": kinds, "kind_of": numbers}


def _levels(section: Field) -> tuple[LinkLevel, ...]:
    items = list(section.items())
    levels: list[LinkLevel] = []
    for item in items:
        outermost = len(levels) == len(items) - 1 > 0
        row = item.members((*LINK, "devices_per_port"), ("devices",))
        if outermost == ("devices" in row):
            fault = "leave it out: the outermost level contains everything" if outermost else "missing"
            raise item.member("devices").error(fault)
        name, inner = row["name"].text(), [level.name for level in levels]
        if name in inner:
            raise row["name"].error(f"two levels are named {name!r}")
        devices = None if outermost else row["devices"].whole()
        within = levels[-1].devices if levels else devices
        assert within is not None
        if levels and devices is not None and (devices <= within or devices % within):
            raise row["devices"].error(f"levels must nest: {devices} is no larger multiple of {inner[-1]}'s {within}")
        sharing = row["devices_per_port"].whole_or_name(inner)
        if isinstance(sharing, int) and within % sharing:
            raise row["devices_per_port"].error(f"{sharing} does not divide the {within} devices of the group inside")
        levels.append(
            LinkLevel(name, devices, row["latency_s"].number(), row["bandwidth_bytes_per_s"].number(), sharing)
        )
    return tuple(levels)


def _link(item: Field) -> Link:
    row = item.members(LINK)
    return Link(row["name"].text(), row["latency_s"].number(), row["bandwidth_bytes_per_s"].number())
