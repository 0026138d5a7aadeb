"""A field of a profile that cannot be: its path and what is wrong with it, in one line. A row a field."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest

from layerwise.errors import LayerwiseError
from layerwise.machine import load
from layerwise.machine.profiles import parse, write
from tests.machine.test_devices import LINKS
from tests.machine.test_profiles import ONE

V100 = json.loads((resources.files("layerwise.profiles") / "v100.json").read_text(encoding="utf-8"))

# `...` takes the field away, "same" repeats the first of a list.
FIELDS: list[tuple[str, object, str]] = [
    ("levels[1].latency_s.value", -1e-6, "finite number above 0, found -1e-06"),
    ("levels[1].latency_s.value", 0, "above 0, found 0"),
    ("levels[0].bandwidth_bytes_per_s.value", 1e-310, "above 0, found 1e-310"),
    ("device.memory_bytes.value", "16 GB", "expected a number, found the string '16 GB'"),
    ("device.memory_bytes.value", True, "expected a number, found true"),
    ("device.memory_bytes.value", None, "expected a number, found null"),
    ("device.processors.value", 79.5, "expected a whole number, found 79.5"),
    ("device.tiles[2].efficiency", {"value": 85, "source": "in per cent"}, "at most 1, found 85"),
    ("device.tiles", [], "expected a list of at least one item, found a list with nothing in it"),
    ("device.peak_flops.float32", ..., "missing"),
    ("device.peak_flops.bfloat", {"value": 1e12, "source": "x"}, "unknown field; did you mean 'bfloat16'"),
    ("device.memory_bytes.source", ..., "missing"),
    ("device.memory_bytes.source", "  ", "expected a non-empty string"),
    ("device.kernel_floor_s", 5e-6, "expected an object with value, source, found the number 5e-06"),
    ("device.memmory_bytes", {}, "unknown field; did you mean 'memory_bytes'"),
    ("device", ..., "missing"),
    ("levels", {}, "expected a list"),
    ("levels[0].devices", ..., "missing"),
    ("levels[2].devices", {"value": 272, "source": "two racks"}, "leave it out"),
    ("levels[1].devices", {"value": 138, "source": "x"}, "must nest: 138 is no larger multiple of node's 4"),
    ("levels[1].devices", {"value": 4, "source": "x"}, "must nest: 4 is no larger multiple"),
    ("levels[1].devices_per_port", {"value": 3, "source": "x"}, "3 does not divide the 4 devices"),
    ("levels[1].devices_per_port.value", "rack", "expected a whole number or 'node', found 'rack'"),
    ("levels[1].name", "node", "two levels are called 'node'"),
    ("other_links[0].latency_s", ..., "missing"),
    ("speed", 1, "unknown field"),
    ("layer", {}, "unknown field; did you mean 'layers'"),
    ("layers", {"conv1": {"s": 1}}, "unknown field; known here: version, sets"),
    ("format", "profile", '"format": "layerwise-profile"'),
    ("version", 2, "reads version 1 only, found 2"),
    ("version", ..., "reads version 1 only, found null"),
]
OF_LINKS: list[tuple[str, object, str]] = [
    ("links.version", 2, "this layerwise reads version 1 only"),
    ("links.version", True, "this layerwise reads version 1 only"),
    ("links.curves", [], "expected a list of at least one item"),
    ("links.conditions", 3, "expected an object"),
    ("links.curves[0].operation", "gossip", "expected one of message"),
    ("links.curves[0].fan", [2, 1], "the last level must have more than one member"),
    ("links.curves[0].load", 0, "expected a whole number from 1"),
    ("links.curves[0].knots", [[1, 1]], "expected at least two pairs"),
    ("links.curves[0].knots", [[1, 2], [2, 1]], "seconds must not fall"),
    ("links.curves[0].knots", [[2, 1], [2, 1]], "bytes must rise"),
    ("links.curves[0].knots[0][1]", "fast", "expected a number, found the string 'fast'"),
    ("links.curves[2].message_s", [[2, 1], [1, 1]], "bytes must rise"),
    ("links.overlaps[0].operation", "gossip", "expected one of message"),
    ("links.overlaps[0].sync", 1.5, "expected a share from 0.01 to 1, found 1.5"),
    ("links.overlaps", {}, "expected a list"),
]
OF_LAYERS: list[tuple[str, object, str]] = [
    ("layers.version", 2, "this layerwise reads version 1 only, found the number 2"),
    ("layers.sets", [], "expected a list of at least one item"),
    ("layers.sets[0].conditions.dtype", "float8", "expected one of float64"),
    ("layers.sets[0].conditions.threads", -1, "expected a finite number of at"),
    ("layers.sets[0].conditions.channels_last", 1, "channels_last: expected true or false, found the number 1"),
    ("layers.sets[0].conditions.gpu", "x", "unknown field"),
    ("layers.sets[0].made.date", 3, "expected a non-empty string"),
    ("layers.sets[0].operators[0].cells[0].forward_s", "fast", "operators[0].cells[0].forward_s: expected a num"),
    ("layers.sets[0].operators[0].cells[0].extents", [1.5], "cells[0].extents[0]: expected a whole number"),
    ("layers.sets[0].operators[0].cells[0].work", [1, 2], "cells[0].work: expected a list of 6 numbers"),
    ("layers.sets[0].operators[0].cells[0].samples", ..., "cells[0].samples: missing"),
    ("layers.sets[0].operators[0].operator", "{", "operators[0].operator is not JSON"),
    ("layers.sets[0].operators[0].operator", '{"a": 1e999}', "1e999 is more than a float64 holds"),
    ("layers.sets[0].operators[0].operator", "{}", "operators[0].operator: expected a layer's operator"),
    ("layers.sets[0].operators[0].operator", '{"op":1}', "operators[0].operator: expected a layer's operator"),
    (
        "layers.sets[0].operators[0].operator",
        '{"op":{"kind":"conv"},"followers":[3]}',
        "operators[0].operator: expected a layer's",
    ),
    ("layers.sets[0].operators[1].operator", "update sgd", "operators[1].operator: appears twice"),
    ("layers.sets[0].operators[0].cells[1]", "same", "cells[1]: the extents [8, 4] appear twice"),
    ("layers.sets[1]", "same", "layers: sets[1] has the conditions of an earlier one"),
]


@pytest.mark.parametrize(
    ("base", "path", "value", "said"),
    [
        *((V100, *row) for row in FIELDS),
        *((json.loads(write(replace(load("cpu"), links=LINKS))), *row) for row in OF_LINKS),
        *((json.loads(write(replace(load("cpu"), layers=(ONE,)))), *row) for row in OF_LAYERS),
    ],
    ids=[f"{path}: {said}" for path, _, said in (*FIELDS, *OF_LINKS, *OF_LAYERS)],
)
def test_a_bad_field_is_named(base: dict[str, Any], path: str, value: object, said: str) -> None:
    document = copy.deepcopy(base)
    *parents, last = [int(key) if key.isdigit() else key for key in re.findall(r"\w+", path)]
    target: Any = document
    for key in parents:
        target = target[key]
    if value is ...:
        del target[last]
    elif value == "same":
        target.append(copy.deepcopy(target[0]))
    else:
        target[last] = value
    with pytest.raises(LayerwiseError) as caught:
        parse(json.dumps(document), "mine.json")
    message = str(caught.value)
    assert message.startswith("profile mine.json")
    assert said in message
    assert "\n" not in message
    assert value == "same" or path in message
