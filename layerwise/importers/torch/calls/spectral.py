"""Spectral norm, which PyTorch's modules write out as steps of power iteration, found again in a Program.

https://github.com/pytorch/pytorch/blob/main/torch/nn/utils/parametrizations.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from layerwise.errors import LayerwiseError
from layerwise.importers.torch.calls.functional import overwritten
from layerwise.importers.torch.ops.table import SPECTRAL_NORM, base_name
from layerwise.importers.torch.program import Node, Ref, TracedProgram, behind, maker, where

Made = Mapping[str, Node]  # by the name of a value, the node that makes it
Found = tuple[Mapping[str, object], frozenset[str]]  # arguments of the call that it becomes, and nodes no longer needed
WRITE = "aten::div.out"  # normalises u or v where they lie
COPIES = ("alias", "clone", "detach")
TRANSPOSED = ("adjoint", "matrix_H", "mT", "numpy_T", "t", "transpose")


def spectral_norms(program: TracedProgram) -> TracedProgram:
    """The same program with one call of `SPECTRAL_NORM` for each weight / (u · weight v).

    What moves its vectors in another way stays as it is: writes into buffers, which the importer refuses.
    """
    writes = [node for node in program.nodes if node.target == WRITE]
    if not writes:
        return program
    made, values = program.makers, program.values
    buffers = {source.value.name: source for source in program.sources if source.kind == "buffer"}
    used: set[str] = set()
    found: dict[str, Found] = {}
    for node in program.nodes:
        parts = _parts(node, made)
        if parts is None or not {parts.u, parts.v} <= buffers.keys():
            continue
        if values[parts.u].shape != values[parts.weight.name].shape[parts.dim : parts.dim + 1]:
            continue
        if parts.u in used:
            raise LayerwiseError(
                f"{where(node)} has a spectral norm that is computed more than once in "
                f"a forward pass, and moves its vector {buffers[parts.u].target!r} every time, which layerwise would "
                "lose: call such a module once, of all its inputs together, or inside of parametrize.cached()"
            )
        used.add(parts.u)
        if (one := _found(node, parts, program, writes, made)) is not None:
            found[node.name] = one
    gone = {name for _, names in found.values() for name in names}
    nodes = [
        replace(node, target=SPECTRAL_NORM, arguments=found[node.name][0], overload=None)
        if node.name in found
        else node
        for node in program.nodes
        if node.name not in gone
    ]
    return replace(program, nodes=tuple(nodes))


@dataclass(frozen=True, slots=True)
class _Parts:
    """Of weight / (u · matrix v): which dimension of the weight are the matrix's rows, and what computes sigma."""

    weight: Ref
    u: str
    v: str
    dim: int
    sigma: Node


def _parts(node: Node, made: Made) -> _Parts | None:
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
    return None if u is None or v is None or u == v or dim is None else _Parts(weight, u, v, dim, sigma)


def _found(node: Node, parts: _Parts, program: TracedProgram, writes: list[Node], made: Made) -> Found | None:
    """None where the vectors do not move as PyTorch's do, or what is behind the weight is used elsewhere, too."""
    u, v = parts.u, parts.v
    moves = [w for w in writes if _buffer(w.arguments["out"], made) in (u, v)]
    eps = {_moved_by(w, parts, made) for w in moves}
    turns = [_buffer(w.arguments["out"], made) == u for w in moves]
    if not moves or len(moves) % 2 or len(eps) != 1 or None in eps or any(a == b for a, b in pairwise(turns)):
        return None
    last = [Ref(value.name) for one in (parts.sigma, *moves) for value in one.outputs if value]
    before = behind(last, made, {parts.weight.name, u, v})
    place = {one.name: i for i, one in enumerate(program.nodes)}
    end = place[moves[-1].name]
    copied = [place[n.name] for n in before.values() if base_name(n.target) == "clone"]
    values = {u, v, *(value.name for n in before.values() for value in n.outputs if value)}
    users = {n.name for n in program.nodes if any(ref.name in values for ref in n.operands)}
    alone = users <= {*before, node.name} and not any(ref.name in values for ref in program.outputs)
    elsewhere = any(overwritten(n) for n in before.values() if n.target not in (WRITE, "aten::clamp_min_"))
    # Sigma is that of the vectors when all of them have moved.
    if not alone or elsewhere or any(at < end for at in (*copied, place[parts.sigma.name])):
        return None
    arguments = {
        "weight": parts.weight,
        "u": Ref(u),
        "v": Ref(v),
        "dim": parts.dim,
        "iterations": len(moves) // 2,
        "eps": eps.pop(),
        "u_first": turns[0],
    }
    return arguments, frozenset(before)


def _moved_by(write: Node, parts: _Parts, made: Made) -> object:
    """The eps of u = matrix v / max(|matrix v|, eps), or of v = transposed matrix u / ...; None of all else."""
    product, below = maker(write.arguments["self"], made), maker(write.arguments["other"], made)
    if below is not None and base_name(below.target) in ("expand", "expand_as"):
        below = maker(below.arguments["self"], made)
    if product is None or product.target != "aten::mv" or below is None or base_name(below.target) != "clamp_min":
        return None
    norm = maker(below.arguments["self"], made)
    if norm is None or base_name(norm.target) not in ("linalg_vector_norm", "norm"):
        return None
    if norm.arguments["self"] != write.arguments["self"] or norm.arguments.get("ord", norm.arguments.get("p")) != 2:
        return None
    matrix, of_u = product.arguments["self"], _buffer(write.arguments["out"], made) == parts.u
    if not of_u:
        turned = maker(matrix, made)
        if turned is None or base_name(turned.target) not in TRANSPOSED:
            return None
        matrix = turned.arguments["self"]
    from_other = _buffer(product.arguments["vec"], made) == (parts.v if of_u else parts.u)
    right = from_other and _matrix(matrix, made, parts.weight) == parts.dim
    return below.arguments["min"] if right else None


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
