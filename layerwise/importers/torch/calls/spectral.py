"""Spectral norm, which PyTorch's modules write out as steps of power iteration, found again in a Program.

https://github.com/pytorch/pytorch/blob/main/torch/nn/utils/parametrizations.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from layerwise.errors import LayerwiseError
from layerwise.importers.torch.calls.functional import overwritten
from layerwise.importers.torch.ops.table import SPECTRAL_NORM, base_name
from layerwise.importers.torch.traced_program import Node, Ref, TracedProgram, behind, maker, where

Made = Mapping[str, Node]  # by the name of a value, the node that makes it
WRITE = "aten::div.out"  # normalises u or v where they lie
COPIES = ("alias", "clone", "detach")
TRANSPOSED = ("adjoint", "matrix_H", "mT", "numpy_T", "t", "transpose")


def spectral_norms(program: TracedProgram) -> TracedProgram:
    """The same program with one call of `SPECTRAL_NORM` for each weight / (u · weight v).

    What moves its vectors in another way stays as it is: writes into buffers, which the importer refuses.
    """
    if not any(node.target == WRITE for node in program.nodes):
        return program
    made, values = program.makers, program.values
    buffers = {source.value.name: source for source in program.sources if source.kind == "buffer"}
    norms = {node.name: norm for node in program.nodes if (norm := _norm(node, made))}
    norms = {name: norm for name, norm in norms.items() if {norm.u, norm.v} <= buffers.keys()}
    used, nodes, gone = set[str](), list[Node](), set[str]()
    for node in program.nodes:
        norm = norms.get(node.name)
        if norm is not None and values[norm.u].shape == values[norm.weight.name].shape[norm.dim : norm.dim + 1]:
            if norm.u in used:
                raise LayerwiseError(
                    f"{where(node)} has a spectral norm that is computed more than once in a forward pass, and moves "
                    f"its vector {buffers[norm.u].target!r} every time, which layerwise would lose: call such a "
                    "module once, of all its inputs together, or inside of parametrize.cached()"
                )
            used.add(norm.u)
            if (moved := _moved(node, norm, program, made)) is not None:
                node = replace(node, target=SPECTRAL_NORM, arguments=moved[0], overload=None)
                gone |= moved[1]
        nodes.append(node)
    return replace(program, nodes=tuple(node for node in nodes if node.name not in gone))


class _Norm(NamedTuple):
    """Of weight / (u · matrix v): which dimension of the weight are the matrix's rows, and what computes sigma."""

    weight: Ref
    u: str
    v: str
    dim: int
    sigma: Node


def _norm(node: Node, made: Made) -> _Norm | None:
    """None where a node is something else."""
    sigma = maker(node.arguments.get("other"), made) if node.target == "aten::div.Tensor" else None
    if sigma is None or base_name(sigma.target) not in ("dot", "vdot"):
        return None
    product = maker(sigma.arguments["other" if "vdot" in sigma.target else "tensor"], made)
    weight = node.arguments["self"]
    if product is None or product.target != "aten::mv" or not isinstance(weight, Ref):
        return None
    u, v = (_buffer(value, made) for value in (sigma.arguments["self"], product.arguments["vec"]))
    dim = _matrix(product.arguments["self"], made, weight)
    return None if u is None or v is None or u == v or dim is None else _Norm(weight, u, v, dim, sigma)


def _moved(
    node: Node, norm: _Norm, program: TracedProgram, made: Made
) -> tuple[Mapping[str, object], frozenset[str]] | None:
    """The arguments of the call that a norm becomes, and nodes no longer needed.

    None where the vectors do not move as PyTorch's do, or what is behind the weight is used elsewhere, too.
    """
    u, v = norm.u, norm.v
    writes = [w for w in program.nodes if w.target == WRITE]
    moves = [w for w in writes if _buffer(w.arguments["out"], made) in (u, v)]
    eps = {_moved_by(w, norm, made) for w in moves}
    turns = [_buffer(w.arguments["out"], made) == u for w in moves]
    if not moves or len(moves) % 2 or len(eps) != 1 or None in eps or any(a == b for a, b in pairwise(turns)):
        return None
    last = [Ref(value.name) for one in (norm.sigma, *moves) for value in one.outputs if value]
    before = behind(last, made, {norm.weight.name, u, v})
    place = {one.name: i for i, one in enumerate(program.nodes)}
    copied = [place[n.name] for n in before.values() if base_name(n.target) == "clone"]
    values = {u, v, *(value.name for n in before.values() for value in n.outputs if value)}
    users = {n.name for n in program.nodes if any(ref.name in values for ref in n.operands)}
    alone = users <= {*before, node.name} and not any(ref.name in values for ref in program.outputs)
    elsewhere = any(overwritten(n) for n in before.values() if n.target not in (WRITE, "aten::clamp_min_"))
    # Sigma is that of the vectors when all of them have moved.
    if not alone or elsewhere or min([*copied, place[norm.sigma.name]]) < place[moves[-1].name]:
        return None
    arguments = {"weight": norm.weight, "u": Ref(u), "v": Ref(v), "dim": norm.dim, "iterations": len(moves) // 2}
    return arguments | {"eps": eps.pop(), "u_first": turns[0]}, frozenset(before)


def _moved_by(write: Node, norm: _Norm, made: Made) -> object:
    """The eps of u = matrix v / max(|matrix v|, eps), or of v = transposed matrix u / ...; None of all else."""
    product, below = maker(write.arguments["self"], made), maker(write.arguments["other"], made)
    if below is not None and base_name(below.target) in ("expand", "expand_as"):
        below = maker(below.arguments["self"], made)
    if product is None or product.target != "aten::mv" or below is None or base_name(below.target) != "clamp_min":
        return None
    length = maker(below.arguments["self"], made)
    if length is None or base_name(length.target) not in ("linalg_vector_norm", "norm"):
        return None
    order = length.arguments.get("ord", length.arguments.get("p"))
    if length.arguments["self"] != write.arguments["self"] or order != 2:
        return None
    matrix, of_u = product.arguments["self"], _buffer(write.arguments["out"], made) == norm.u
    if not of_u:
        turned = maker(matrix, made)
        if turned is None or base_name(turned.target) not in TRANSPOSED:
            return None
        matrix = turned.arguments["self"]
    from_other = _buffer(product.arguments["vec"], made) == (norm.v if of_u else norm.u)
    return below.arguments["min"] if from_other and _matrix(matrix, made, norm.weight) == norm.dim else None


def _buffer(value: object, made: Made) -> str | None:
    """The tensor that a value is a copy of, or was written to."""
    node = maker(value, made)
    while node is not None and (node.target == WRITE or base_name(node.target) in COPIES):
        value = node.arguments["out" if node.target == WRITE else "self"]
        node = maker(value, made)
    return value.name if node is None and isinstance(value, Ref) else None


def _matrix(value: object, made: Made, weight: Ref) -> int | None:
    """Which dimension of the weight are the rows of this matrix of it; None where it is none."""
    dim: int | None = None
    while value != weight:
        node = maker(value, made)
        if node is None:
            return None
        if base_name(node.target) == "permute":
            order = node.arguments["dims"]
            if dim is not None or not isinstance(order, tuple):
                return None
            dim = order[0]
            if order != (dim, *(d for d in range(len(order)) if d != dim)):
                return None
        elif base_name(node.target) not in ("alias", "detach", "flatten", "reshape", "view"):
            return None
        value = node.arguments["self"]
    return dim or 0
