"""Spectral norm, which PyTorch's modules write out as steps of power iteration, found again in a Program.

https://github.com/pytorch/pytorch/blob/main/torch/nn/utils/parametrizations.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from layerwise.importers.torch.ops.table import SPECTRAL_NORM, base_name
from layerwise.importers.torch.program import Node, Program, Ref

Made = Mapping[str, Node]  # by the name of a value, the node that makes it
WRITE = "aten::div.out"  # normalises u or v where they lie
# What makes sigma of the weight, u and v, and moves these.
STEPS = {
    "adjoint", "alias", "clamp_min", "clone", "detach", "div", "dot", "expand", "expand_as", "flatten",
    "linalg_vector_norm", "matrix_H", "mT", "mv", "norm", "numpy_T", "permute", "reshape", "t", "transpose", "vdot",
    "view",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Found:
    """The arguments of the call that it becomes, and the nodes that are no longer needed."""

    arguments: Mapping[str, object]
    behind: frozenset[str]


def spectral_norms(program: Program) -> Program:
    """The same program with one call of `SPECTRAL_NORM` for each weight / (u · weight v)."""
    writes = [node for node in program.nodes if node.target == WRITE]
    if not writes:
        return program
    made = {v.name: node for node in program.nodes for v in node.outputs if v}
    buffers = {source.value.name for source in program.sources if source.kind == "buffer"}
    found = {n.name: one for n in program.nodes if (one := _found(n, program, writes, made, buffers)) is not None}
    gone = {name for one in found.values() for name in one.behind}
    nodes = [
        replace(node, target=SPECTRAL_NORM, arguments=found[node.name].arguments, overload=None)
        if node.name in found
        else node
        for node in program.nodes
        if node.name not in gone
    ]
    return replace(program, nodes=tuple(nodes))


def _found(node: Node, program: Program, writes: list[Node], made: Made, buffers: set[str]) -> _Found | None:
    """Of weight / sigma; None where a node is something else, or what is behind it is used elsewhere, too."""
    sigma = _maker(node.arguments.get("other"), made) if node.target == "aten::div.Tensor" else None
    if sigma is None or base_name(sigma.target) not in ("dot", "vdot"):
        return None
    product = _maker(sigma.arguments["other" if "vdot" in sigma.target else "tensor"], made)
    if product is None or product.target != "aten::mv":
        return None
    weight = node.arguments["self"]
    u, v = (_buffer(value, made) for value in (sigma.arguments["self"], product.arguments["vec"]))
    moves = [w for w in writes if _buffer(w.arguments["out"], made) in (u, v)]
    if not isinstance(weight, Ref) or u is None or v is None or not {u, v} <= buffers or len(moves) % 2 or not moves:
        return None
    ends = {weight.name, u, v}
    behind: dict[str, Node] = {}
    for last in (sigma, *moves):
        _walk(last, made, ends, behind)
    dim = _matrix(product.arguments["self"], made, weight)
    eps = {n.arguments["min"] for n in behind.values() if base_name(n.target) == "clamp_min"}
    known = all(base_name(n.target) in STEPS and (n.target == WRITE or "div" not in n.target) for n in behind.values())
    inside = {*behind, node.name}
    values = {value.name for n in behind.values() for value in n.outputs if value}
    users = [n.name for n in program.nodes if any(ref.name in values for ref in n.operands)]
    alone = set(users) <= inside and not any(ref.name in values for ref in program.outputs)
    turns = [_buffer(w.arguments["out"], made) == u for w in moves]
    in_turn = all(a != b for a, b in pairwise(turns))
    if dim is None or len(eps) != 1 or not known or not alone or not in_turn:
        return None
    arguments = {
        "weight": weight,
        "u": Ref(u),
        "v": Ref(v),
        "dim": dim,
        "iterations": len(moves) // 2,
        "eps": eps.pop(),
        "u_first": turns[0],
    }
    return _Found(arguments, frozenset(behind))


def _walk(node: Node, made: Made, ends: set[str], seen: dict[str, Node]) -> None:
    """Notes a node and all that it is made of, as far as `ends`."""
    if node.name in seen:
        return
    seen[node.name] = node
    for ref in node.operands:
        if ref.name not in ends and ref.name in made:
            _walk(made[ref.name], made, ends, seen)


def _buffer(value: object, made: Made) -> str | None:
    """The tensor that a value is a copy of, or was written to."""
    node = _maker(value, made)
    while node is not None and (node.target == WRITE or base_name(node.target) in ("alias", "clone", "detach")):
        value = node.arguments["out" if node.target == WRITE else "self"]
        node = _maker(value, made)
    return value.name if node is None and isinstance(value, Ref) else None


def _matrix(value: object, made: Made, weight: Ref) -> int | None:
    """Which dimension of the weight are the rows of this matrix of it; None where it is none."""
    dim = 0
    while value != weight:
        node = _maker(value, made)
        if node is None:
            return None
        if base_name(node.target) == "permute":
            order = node.arguments["dims"]
            assert isinstance(order, tuple)
            dim = order[0]
            if order != (dim, *(d for d in range(len(order)) if d != dim)):
                return None
        elif base_name(node.target) not in ("alias", "detach", "flatten", "reshape", "view"):
            return None
        value = node.arguments["self"]
    return dim


def _maker(value: object, made: Made) -> Node | None:
    return made.get(value.name) if isinstance(value, Ref) else None
