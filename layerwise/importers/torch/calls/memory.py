"""Tensors of a PyTorch program that share memory, and what is written in place."""

from __future__ import annotations

from collections.abc import Iterator

from layerwise.errors import LayerwiseError
from layerwise.importers.torch.ops.table import base_name
from layerwise.importers.torch.program import Node, Program, Ref, module_path, refs

STATISTICS = {"_native_batch_norm_legit"}  # these write running statistics, which their layers remember


def overwritten(node: Node) -> tuple[str, ...]:
    """The tensors that a call writes into: of relu_, add_, copy_, ... the first, of others what they have as `out`."""
    if base_name(node.target) in STATISTICS:
        return ()
    arguments = node.overload._schema.arguments if node.overload is not None else ()
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    named = base_name(node.target) != node.target.partition("::")[2].partition(".")[0]
    if not written and named:
        return tuple(ref.name for ref in node.operands[:1])
    return tuple(ref.name for name in written for ref in refs((node.arguments.get(name),)))


class Memory:
    """Follows a program call by call: which tensors are views of which, and which was overwritten by which."""

    def __init__(self, program: Program) -> None:
        self.latest: dict[str, str] = {}  # what was written in place -> the result
        self.base: dict[str, str] = {}  # views -> the tensor whose memory they share
        self.last = {r.name: i for i, node in enumerate(program.nodes) for r in node.operands}
        self.last |= {ref.name: len(program.nodes) for ref in program.outputs}  # those are used after all calls

    def current(self, name: str) -> str:
        """What a tensor is known by now."""
        while name in self.latest:
            name = self.latest[name]
        return name

    def written(self, node: Node) -> str | None:
        """The tensor that a call overwrites, if it does: from now on it is known by the call's result."""
        for name, seen in shared(node):
            self.base[name] = self.base.get(self.current(seen), self.current(seen))
        into = overwritten(node)
        if len(into) > 1 or (into and (not node.outputs or node.outputs[0] is None)):
            path = module_path(node.stack)
            raise LayerwiseError(
                f"{f'layer {path!r}' if path else 'the model'} calls {node.target}, which writes into several tensors "
                "or returns none; write it without the underscore or out="
            )
        return self.current(into[0]) if into else None

    def views(self, name: str) -> list[str]:
        """All tensors in the same memory."""
        base = self.base.get(name, name)
        return [base, *(view for view, of in self.base.items() if of == base)]

    def seen_later(self, place: int, node: Node, written: str) -> str | None:
        """Another tensor in the memory that call `place` overwrites, which is used after it."""
        own = {v.name for v in node.outputs if v} | {written}
        later = (n for n in self.views(written) if self.current(n) not in own and self.last.get(n, -1) > place)
        return next(later, None)


def shared(node: Node) -> Iterator[tuple[str, str]]:
    """Outputs that share memory with an operand, by the operator's schema: (output, operand)."""
    if node.overload is None:
        return
    schema = node.overload._schema
    for argument in schema.arguments:
        seen = node.arguments.get(argument.name)
        if argument.alias_info is None or not isinstance(seen, Ref):
            continue
        if any(r.alias_info is not None for r in schema.returns):
            yield from ((v.name, seen.name) for v in node.outputs if v)
