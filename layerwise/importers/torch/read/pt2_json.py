"""The graph of a .pt2 file, read from its JSON without PyTorch's own reader.

torch 2.13's own reader evaluates symbolic sizes with sympify (eval) and imports modules that the file names: a tampered
file runs code that way too, not only by its pickles (tests/importers/torch/read/test_load_pt2.py). Here names are only
compared, sizes are the integers beside the strings, and operators are looked up among those that torch has registered.
Schema: https://github.com/pytorch/pytorch/blob/main/torch/_export/serde/schema.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from layerwise.errors import LayerwiseError
from layerwise.importers.registry import canonical
from layerwise.importers.torch.traced_program import (
    REGIONS,
    Node,
    Ref,
    Source,
    Stack,
    TracedProgram,
    Value,
    bind,
    control_flow,
    leave_region,
    left_open,
    module_path,
)

Json = Any  # what is not as the schema has it raises whatever it raises, and the caller refuses the file
Find = Callable[[str, Value], Callable[[], torch.Tensor | None]]

MAJOR = 8  # of the schema; minor versions only add
DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64",
    9: "complex32", 10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16",
    29: "float8_e4m3fn", 30: "float8_e5m2", 31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 34: "uint32", 35: "uint64",
}  # fmt: skip
_OPERATOR = re.compile(r"torch\.ops\.([A-Za-z]\w*|_c10d_functional)\.([A-Za-z_]\w*)\.([A-Za-z]\w*)")
_REGION = re.compile(r"torch\.ops\.higher_order\.(\w+)")
_SYMBOL = re.compile(r"Symbol\('\w+'(, \w+=(True|False))*\)|[a-z]\w*")
_SOURCES = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}


def read_json(document: Json, name: str, same: Mapping[str, str], find: Find) -> TracedProgram:
    """The program of a models/*.json.

    `same` gives for each name of a shared parameter the one that it goes by. `find` looks for a stored tensor, raises
    where the file has none like it, and gives how to read it, where it is small.
    """
    version = document["schema_version"]
    if version.get("major") != MAJOR:
        raise LayerwiseError(
            f"its schema has version {version.get('major')}.{version.get('minor')}, layerwise reads {MAJOR}; "
            "export it again with torch 2.11 or later"
        )
    module = document["graph_module"]
    graph, signature = module["graph"], module["signature"]
    reader = _JsonReader(graph)
    sources: list[Source] = []
    first: dict[str, Ref] = {}
    for item in signature["input_specs"]:
        ((kind, body),) = item.items()
        if kind == "user_input":
            source = reader.user_input(body["arg"])
            if source is not None:
                sources.append(source)
        elif kind in _SOURCES:
            ref, target = body["arg"]["name"], body[_SOURCES[kind]]
            value = reader.value(ref)
            read = find(target, value)
            target = same.get(target, target)
            if target in first:
                reader.names[ref] = first[target]
                continue
            first[target] = reader.names[ref] = Ref(ref)
            stored = None if kind == "parameter" else read()  # now, while the file is open
            role = "parameter" if kind == "parameter" else "buffer"
            sources.append(Source(role, value, target, lambda stored=stored: stored))  # type: ignore[misc]
        elif kind == "custom_obj":
            raise LayerwiseError("it has an input that is an object of a C++ class; layerwise needs tensors")
    reader.calls(graph)
    outputs = []
    for item in signature["output_specs"]:
        ((kind, body),) = item.items()
        arg = body["arg"]
        if kind == "user_output" and "as_tensor" in arg:
            outputs.append(arg["as_tensor"]["name"])
        elif kind == "loss_output":
            outputs.append(arg["name"])
    returned = tuple(reader.ref(o) for o in outputs)
    return TracedProgram(name, tuple(sources), tuple(reader.nodes), returned, reader.device(), from_file=True)


class _JsonReader:
    """One graph; those of its regions are read by others that share its list of calls."""

    def __init__(self, graph: Json, prefix: str = "") -> None:
        self.prefix = prefix
        self.tensors = graph["tensor_values"]
        self.numbers = {
            name: _number(value, name)
            for kind in ("sym_int_values", "sym_float_values", "sym_bool_values")
            for name, value in (graph.get(kind) or {}).items()
        }
        self.names: dict[str, Ref] = {}
        self.nodes: list[Node] = []

    def value(self, name: str) -> Value:
        """A tensor by its name in the file."""
        meta = self.tensors[name]
        shape = tuple(int(_number(size, name)) for size in meta["sizes"])
        return Value(self.prefix + name, shape, DTYPES.get(meta["dtype"], "unknown"))

    def device(self) -> str:
        """The type of the device that the model was traced on."""
        return next((str(meta["device"]["type"]) for meta in self.tensors.values()), "cpu")

    def ref(self, name: str) -> Ref:
        return self.names[name] if name in self.names else Ref(self.value(name).name)

    def user_input(self, arg: Json) -> Source | None:
        """An input of the model; numbers are fixed in the graph and need none."""
        if "as_tensor" not in arg:
            if "as_custom_obj" in arg or "as_name" in (arg.get("as_sym_int") or {}):
                raise LayerwiseError("it has an input that is no tensor and is left open")
            return None
        name = arg["as_tensor"]["name"]
        for dim, size in enumerate(self.tensors[name]["sizes"]):
            symbol = size["as_expr"]["expr_str"] if "as_expr" in size else None
            if symbol is not None and (dim > 0 or not _SYMBOL.fullmatch(symbol)):
                raise left_open(name, dim, symbol[:60])
        return Source("input", self.value(name), name)

    def calls(self, graph: Json) -> None:
        for node in graph["nodes"]:
            target, results = node["target"], node["outputs"]
            stack = _stack(node["metadata"].get("nn_module_stack") or "")
            if region := _REGION.fullmatch(target):
                self.region(region[1], node, stack)
                continue
            names = [name for result in results for name in _names(result)]
            if results and all(name in self.numbers for name in names if name is not None) and any(names):
                continue  # a size, whose value is known
            match = _OPERATOR.fullmatch(target)
            if match is None:
                raise LayerwiseError(f"layer {module_path(stack)!r} calls {target[:80]!r}, which is no torch operator")
            overload = _overload(*match.groups())
            called = canonical(f"{match[1]}.{match[2]}.{match[3]}")
            given = {i["name"]: self.argument(i["arg"]) for i in node["inputs"]}
            if overload is not None:
                given = bind(overload, (), given)
            own = node.get("name") or next((name for name in names if name), called)
            outputs = tuple(self.value(name) if name is not None and name in self.tensors else None for name in names)
            self.nodes.append(Node(self.prefix + own, called, given, outputs, stack, overload))

    def region(self, kind: str, node: Json, stack: Stack) -> None:
        """Inlines a graph that is an argument."""
        arguments = [i["arg"] for i in node["inputs"]]
        place = next((i for i, a in enumerate(arguments) if "as_graph" in a), None)
        if kind not in REGIONS or place is None:
            raise control_flow(kind, module_path(stack))
        graph = arguments[place]["as_graph"]["graph"]
        inner = _JsonReader(graph, f"{self.prefix}{arguments[place]['as_graph']['name']}.")
        inner.nodes = self.nodes
        given = arguments[place + 1 + REGIONS[kind] :]
        for formal, actual in zip(graph["inputs"], given, strict=True):
            (inside,) = _names(formal)
            outside = self.argument(actual)
            if isinstance(outside, Ref) and inside is not None:
                inner.names[inside] = outside
        before = len(self.nodes)
        inner.calls(graph)
        returned = [name for result in graph["outputs"] for name in _names(result)]
        taken = [name for result in node["outputs"] for name in _names(result)]
        pairs = [
            (name, inner.ref(result))
            for name, result in zip(taken, returned, strict=True)
            if name is not None and result is not None and name in self.tensors
        ]
        around = [self.argument(a) for a in arguments[:place]]
        made = leave_region(kind, self.nodes, before, around, [ref for _, ref in pairs])
        self.names.update(zip((name for name, _ in pairs), made, strict=True))  # type: ignore[arg-type]

    def argument(self, arg: Json) -> object:
        """An argument as a Node has it."""
        ((kind, value),) = arg.items()
        if kind == "as_tensor":
            return self.ref(value["name"])
        if kind == "as_tensors":
            return tuple(self.ref(t["name"]) for t in value)
        if kind in ("as_optional_tensors", "as_arguments"):
            return tuple(self.argument(v) for v in value)
        if kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
            return self.numbers[value["as_name"]] if "as_name" in value else _number(value)
        if kind in ("as_float", "as_floats"):  # also "Infinity", "NaN"
            return tuple(map(float, value)) if kind.endswith("s") else float(value)
        if kind in ("as_int", "as_bool", "as_string"):
            return value
        if kind in ("as_ints", "as_bools", "as_strings"):
            return tuple(value)
        if kind in ("as_sym_ints", "as_sym_floats", "as_sym_bools"):
            return tuple(self.argument({kind.removesuffix("s"): v}) for v in value)
        if kind == "as_scalar_type":
            return getattr(torch, DTYPES[value]) if value in DTYPES else None
        if kind == "as_device":
            return torch.device("cpu")  # where it ran; constants are computed here
        if kind in ("as_none", "as_memory_format", "as_layout"):
            return None
        raise LayerwiseError(f"it has an argument of the kind {kind[:40]!r}, which layerwise does not read")


def _number(value: Any, where: str = "") -> int | float | bool:
    """The number that a size has; of a symbolic one, with the inputs that the model was exported with."""
    ((kind, number),) = value.items()
    if kind == "as_expr":
        if number.get("hint") is None:
            size = str(number["expr_str"])[:60]
            raise LayerwiseError(
                f"size {size} of {where!r} is left open or depends on data; layerwise plans fixed sizes"
            )
        ((_, number),) = number["hint"].items()
    if not isinstance(number, int | float):
        raise TypeError(f"{str(number)[:40]!r} where a number should be")
    return number


def _names(result: Json) -> list[str | None]:
    """What an output (or a formal input) is called; a list of tensors has several names."""
    ((kind, value),) = result.items()
    if kind == "as_tensor":
        return [value["name"]]
    if kind == "as_tensors":
        return [v["name"] for v in value]
    if kind == "as_optional_tensors":
        return [name for v in value for name in _names(v)]
    if kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
        return [value.get("as_name")]
    return [None]


def _overload(namespace: str, name: str, overload: str) -> torch._ops.OpOverload | None:
    """The operator, if torch knows it in this process."""
    operator = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    return operator if isinstance(operator, torch._ops.OpOverload) else None


def _stack(said: str) -> Stack:
    """The modules around a call: "key,path,class;..."."""
    entries = []
    for entry in said.split(";") if said else []:
        key, *path, kind = entry.split(",")
        shown = "".join(c if c.isprintable() else "?" for c in ",".join(path))
        if not shown.startswith("_empty_nn_module_stack"):
            entries.append((key, shown, kind))
    return tuple(entries)
