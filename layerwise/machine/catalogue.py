"""Machines composed of a device and links: `a100-80,node=4,link=200Gb/s`, from `profiles/devices.toml`.

That file has a row for each device instead of a profile for each machine, as people use the same devices in many
networks. Latencies and the achieved share of the peak, which data sheets do not state, are taken from a built-in
profile and marked as assumed.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from layerwise.errors import LayerwiseError, nearest
from layerwise.quantities import parse_rate, parse_time

BUILT_IN = "layerwise.profiles"
PCIE = {"pcie3": 15.75e9, "pcie4": 31.5e9, "pcie5": 63e9}  # x16, bytes per second each way: GT/s x 16 x 128/130 / 8
OPTIONS = ("node", "intra", "link", "kinds")
Document = dict[str, Any]


@cache
def devices() -> Mapping[str, Mapping[str, Any]]:
    """The rows of `devices.toml`, by name."""
    return tomllib.loads((resources.files(BUILT_IN) / "devices.toml").read_text(encoding="utf-8"))


def reported(device: str) -> str | None:
    """The name in `devices` of a device under CUDA's or ROCm's name for it; None if it is unknown."""
    matching = [name for name, row in devices().items() if re.search(rf"{row['reports']}(?!\w)", device.lower())]
    return max(matching, key=lambda name: len(devices()[name]["reports"]), default=None)


def is_composed(spec: str, built_in: list[str]) -> bool:
    """True if it names a device, or changes the links of a built-in profile."""
    name, comma, _ = spec.partition(",")
    return name in devices() or (bool(comma) and name in built_in)


def composed(spec: str) -> str:
    """The JSON of the profile that `DEVICE[,node=G][,intra=300GB/s][,link=4x200Gb/s:5us][,kinds=a:1+b:2]` describes.

    kinds: devices of several kinds in the order of ranks, each with its number; `b@0.5` has half the speed of b.
    intra: a rate one way, or pcie3 to pcie5. link: the rate of one port between nodes, with the number of a node's
    ports before the x (default 1) and optionally the latency. Without it, the machine is a single node. Raises
    LayerwiseError for an invalid option.
    """
    name, *stated = spec.split(",")
    options = dict(option.partition("=")[::2] for option in stated)
    if len(options) < len(stated):
        raise LayerwiseError(f"machine {spec!r}: an option is given twice")
    for option in options:
        if option not in OPTIONS:
            raise LayerwiseError(
                f"machine {spec!r}: unknown option {option!r}{nearest(option, OPTIONS)}: there are {', '.join(OPTIONS)}"
            )
    row = devices().get(name, {})
    document = _built_in(row.get("profile", name)) if "profile" in row or not row else _of_device(row)
    document |= {"name": spec, "description": f"{spec}: {document['device']['name']}"}
    if "profile" in row:
        document["levels"] = document["levels"][:1]
    node = document["levels"][0]
    if "node" in options:
        node["devices"] = _number(_count(options["node"], spec), "as asked for")
    if "intra" in options:
        node |= _inside(options["intra"])
    if "link" in options:
        document["levels"] = [node, _between(options["link"], int(node["devices"]["value"]), spec)]
    if "kinds" in options:
        kinds = [kind.rpartition(":")[::2] for kind in options["kinds"].split("+")]
        names = list(dict.fromkeys(name for name, _ in kinds))
        document["device"], *others = (_kind(name, spec) for name in names)
        document.pop("layers", None)  # of one of the kinds alone
        if others:
            kind_of = [names.index(name) for name, number in kinds for _ in range(_count(number, spec))]
            document |= {"version": 2, "other_devices": others, "kind_of": kind_of}
    return json.dumps(document)


def _kind(name: str, spec: str) -> Document:
    """The device of a row, or of a built-in profile; `name@0.5` at half its speed. LayerwiseError where none is so."""
    name, slower, share = name.partition("@")
    row = devices().get(name, {})
    try:
        document = _of_device(row) if "like" in row else _built_in(row.get("profile", name))
    except FileNotFoundError:
        raise LayerwiseError(
            f"machine {spec!r}: devices of kind {name!r} have no times and no profile{nearest(name, devices())}: name "
            "them as `layerwise machines` does"
        ) from None
    device: Document = copy.deepcopy(document["device"])
    if slower:
        factor = parse_share(share, spec)
        device["name"] += f" at {factor:g} of its speed"
        rates = [device["peak_flops"][dtype] for dtype in device["peak_flops"]]
        for number in (*rates, device["memory_bandwidth_bytes_per_s"]):
            number["value"] *= factor
        device["kernel_floor_s"]["value"] /= factor
    return device


def parse_share(text: str, spec: str) -> float:
    """A number above 0."""
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1e6:
        raise LayerwiseError(f"machine {spec!r}: {text!r} is not a share of a device's speed, such as 0.5")
    return share


def _of_device(row: Mapping[str, Any]) -> Document:
    """The document for one node of a device's row, each number with its source."""
    document = _built_in(row["like"])
    like = document["device"]
    device: Document = {"name": row["name"]}
    for key in ("memory_bytes", "memory_bandwidth_bytes_per_s", "processors"):
        device[key] = _sourced(row[key], row["source"])
    device["peak_flops"] = {dtype: _sourced(peak, row["source"]) for dtype, peak in row["peak_flops"].items()}
    device["kernel_floor_s"] = like["kernel_floor_s"]
    device["tiles"] = [
        tile | {"efficiency": _number(tile["efficiency"]["value"], f"assumption: as of the {like['name']}")}
        for tile in like["tiles"]
    ]
    intra = _inside(row["intra"]) if isinstance(row["intra"], str) else _level("h100", row["intra"])
    if row["name"].startswith("MI"):
        intra["latency_s"]["source"] = f"assumption: as over NVLink: {intra['latency_s']['source']}"
    node = {"name": "node", "devices": _number(row["node"], "assumption: as many as such nodes often have")} | intra
    node["devices_per_port"] = _number(1, "each device has links of its own")
    return {"format": document["format"], "version": document["version"], "device": device, "levels": [node]}


def _inside(rate: str) -> Document:
    """The latency and the bandwidth of a link in a node."""
    if rate in PCIE:
        source = f"PCI Express {rate[-1]}.0 x16; assumption: 16 lanes for every card, and no detour over host memory"
        return _level("pcie", _number(PCIE[rate], source))
    return _level("h100", _number(parse_rate(rate, "--intra"), "as asked for"))


def _level(like: str, bandwidth: Document) -> Document:
    latency = _built_in(like)["levels"][0]["latency_s"]
    return {"latency_s": latency, "bandwidth_bytes_per_s": bandwidth}


def _between(link: str, node: int, spec: str) -> Document:
    """The level between nodes."""
    match = re.fullmatch(r"(?:([0-9]+)x)?([^:]+)(?::(.+))?", link)
    if match is None:
        raise LayerwiseError(
            f"--link is {link!r}, but must be a rate such as 200Gb/s, 4x200Gb/s (ports a node) or 25Gb/s:50us"
        )
    ports = _count(match[1] or "1", spec)
    if node % ports:
        raise LayerwiseError(f"--link {link}: {ports} ports cannot be shared equally by the {node} devices of a node")
    latency = _built_in("h100")["levels"][1]["latency_s"]
    if match[3]:
        latency = _number(parse_time(match[3], "the latency of --link"), "as asked for")
    source = "as asked for" if match[1] else "assumption: one port a node"
    return {
        "name": "cluster",
        "latency_s": latency,
        "bandwidth_bytes_per_s": _number(parse_rate(match[2], "--link"), "as asked for"),
        "devices_per_port": _number("node" if ports == 1 else node // ports, source),
    }


def _count(text: str, spec: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", text) or not 1 <= int(text) <= 2**16:
        raise LayerwiseError(f"machine {spec!r}: {text!r} is not a whole number from 1 to {2**16:,}")
    return int(text)


def _built_in(name: str) -> Document:
    document: Document = json.loads((resources.files(BUILT_IN) / f"{name}.json").read_text(encoding="utf-8"))
    return document


def _sourced(value: Any, source: str) -> Document:
    return value if isinstance(value, dict) else _number(value, source)


def _number(value: float | str, source: str) -> Document:
    return {"value": value, "source": source}
