"""Rewrites a program without in-place writes: after a write, the tensor and its views are new tensors.

After a write into a view, the tensor behind it is rebuilt with the new values in their place; its other views are taken
again where they are used. https://pytorch.org/docs/stable/tensor_view.html
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from layerwise.errors import LayerwiseError
from layerwise.importers.torch.ops.table import base_name
from layerwise.importers.torch.ops.views import TURNED, order_of
from layerwise.importers.torch.traced_program import (
    Node,
    Ref,
    Source,
    TracedProgram,
    Value,
    behind,
    bind,
    refs,
    where,
)

STATISTICS = {"_native_batch_norm_legit"}  # these update running statistics, which their layers track themselves
COUNTER = "num_batches_tracked"
RETYPED = ("view", "view_as_real", "view_as_complex", "real", "imag")  # views as another type
SHAPED = ("view", "unsqueeze", "squeeze", "alias")  # views of all elements, in order
VIEWS = (
    *SHAPED, *TURNED, "slice", "select", "expand", "expand_as", "detach", "split", "split_with_sizes", "chunk", "unbind"
)  # fmt: skip


def functional(program: TracedProgram) -> TracedProgram:
    """The program without in-place writes. Raises LayerwiseError if one's effect is unknown, or lasts in a buffer."""
    if not any(overwritten(node) for node in program.nodes):
        return program
    writer = _Writer(program)
    for node in program.nodes:
        writer.add(node)
    outputs = tuple(Ref(writer.current(ref.name)) for ref in program.outputs)
    return replace(program, nodes=tuple(writer.nodes), outputs=outputs, effects=tuple(writer.effects))


def overwritten(node: Node) -> tuple[str, ...]:
    """The tensors that a call writes into: the first for relu_, add_, copy_, ..., else its `out` arguments."""
    if base_name(node.target) in STATISTICS:
        return ()
    arguments = node.overload._schema.arguments if node.overload is not None else ()
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    named = base_name(node.target) != node.target.partition("::")[2].partition(".")[0]
    if not written and named:
        return tuple(ref.name for ref in node.operands[:1])
    return tuple(ref.name for name in written for ref in refs((node.arguments.get(name),)))


class _Writer:
    """Goes through a program call by call. Tensors have the program's names, values the result's names."""

    def __init__(self, program: TracedProgram) -> None:
        self.sources = {source.value.name: source for source in program.sources}
        self.values = program.values
        self.nodes: list[Node] = []
        self.effects: dict[str, None] = {}  # a phrase for each parameter written into
        self.same: dict[str, str] = {}  # result of an in-place call -> the tensor it wrote into
        self.views: dict[str, tuple[str, Node]] = {}  # the base tensor, and the call that made the view
        self.perhaps: dict[str, set[str]] = defaultdict(set)  # tensors that may share memory
        self.unsure: dict[str, Node] = {}  # tensors that may have been written into, and by which call
        self.now: dict[str, str] = {}  # tensor -> present value
        self.writes: dict[str, int] = defaultdict(int)  # number of writes into a base tensor's memory
        self.seen: dict[str, int] = {}  # that number when the value was made

    def add(self, node: Node) -> None:
        written = overwritten(node)
        call = replace(node, arguments={k: self._renamed(v) for k, v in node.arguments.items()})
        if not written:
            self.nodes.append(call)
            self._note_views(node)
            return
        near = {root for name in written for root in self._near(self._root(self._tensor(name)))}
        out = node.outputs[0] if node.outputs else None
        kept = [self.sources[root] for root in near if root in self.sources and self._is_kept(self.sources[root])]
        if kept:
            self._check_kept(node, call, kept)
        if kept and out is not None:
            self.same[out.name] = self._tensor(written[0])  # training goes on with its new values
            return
        if len(written) > 1 or out is None:
            raise LayerwiseError(
                f"{where(node.stack)} calls {node.target}, which writes into several tensors or returns none: write it "
                "without the underscore or out="
            )
        tensor = self._tensor(written[0])
        self.unsure |= dict.fromkeys(near - {self._root(tensor)}, node)
        self.nodes.append(self._filled(call, out))
        self.same[out.name] = tensor
        self._write(tensor, out.name, node)

    def current(self, name: str) -> str:
        """The present value of a tensor. Raises LayerwiseError if it is unknown."""
        tensor = self._tensor(name)
        root = self._root(tensor)
        if root in self.unsure:
            raise _seen_elsewhere(self.unsure[root], name)
        if self.seen.get(tensor, 0) == self.writes[root]:
            return self.now.get(tensor, tensor)
        node = self.views[tensor][1]
        number, position = self.writes[root], [v.name if v else None for v in node.outputs].index(tensor)
        outputs = tuple(replace(v, name=f"{v.name}.{number}") if v else None for v in node.outputs)
        arguments = {k: self._renamed(v) for k, v in node.arguments.items()}
        self.nodes.append(replace(node, name=f"{node.name}.{number}.{position}", arguments=arguments, outputs=outputs))
        for view, made in zip(node.outputs, outputs, strict=True):
            if view and made:
                self.now[view.name], self.seen[view.name], self.values[made.name] = made.name, number, made
        return self.now[tensor]

    def _write(self, tensor: str, value: str, node: Node) -> None:
        root = self._root(tensor)
        number = self.writes[root] + 1
        while True:
            self.now[tensor], self.seen[tensor] = value, number
            if tensor == root:
                break
            base, view = self.views[tensor]
            value, tensor = self._behind(view, tensor, base, self.current(base), value, node), base
        self.writes[root] = number

    def _near(self, root: str) -> set[str]:
        """The tensors that may share memory with this one, itself included."""
        near, left = {root}, [root]
        while left:
            for other in self.perhaps[left.pop()] - near:
                near.add(other)
                left.append(other)
        return near

    def _behind(self, view: Node, tensor: str, base: str, before: str, value: str, node: Node) -> str:
        """The base tensor of a view, with the view's new value in its place."""
        kind, shape = base_name(view.target), self.values[base].shape
        dim = view.arguments.get("dim", 0)
        if kind in SHAPED and self.values[tensor].dtype == self.values[base].dtype:
            return self._call("view", node, base, {"self": Ref(value), "size": shape})
        if kind in TURNED:
            order = order_of(view.target, view.arguments, len(shape))
            inverse = tuple(order.index(i) for i in range(len(order)))
            return self._call("permute", node, base, {"self": Ref(value), "dims": inverse})
        assert isinstance(dim, int)
        bound = {"self": Ref(before), "src": Ref(value), "dim": dim % max(len(shape), 1)}
        if kind == "slice":
            start, end, step = (view.arguments[name] for name in ("start", "end", "step"))
            if slice(start, end, step).indices(shape[dim]) == (0, shape[dim], 1):
                return value
            return self._call("slice_scatter", node, base, bound | {"start": start, "end": end, "step": step})
        if kind == "select":
            return self._call("select_scatter", node, base, bound | {"index": view.arguments["index"]})
        raise _seen_elsewhere(node, tensor)

    def _call(self, kind: str, node: Node, like: str, bound: Mapping[str, object]) -> str:
        overload = getattr(torch.ops.aten, kind).default
        name = f"{node.name}.{len(self.nodes)}"
        value = replace(self.values[like], name=name)
        self.values[name] = value
        made = Node(
            name, f"aten::{kind}", bind(overload, (), dict(bound)), (value,), node.stack, overload, node.autocast
        )
        self.nodes.append(made)
        return name

    def _filled(self, node: Node, out: Value) -> Node:
        """Replaces fill_ and zero_ by a copy of a number: a `full` would not know which size is the samples."""
        if node.target.partition("::")[2].partition(".")[0] not in ("fill_", "zero_"):
            return node
        number, copy, full = node.arguments.get("value", 0), torch.ops.aten.copy_.default, torch.ops.aten.full.default
        if not isinstance(number, Ref):
            value = Value(f"{node.name}.{len(self.nodes)}", (), out.dtype)
            self.values[value.name] = value
            given = bind(full, (), {"size": (), "fill_value": number, "dtype": getattr(torch, out.dtype)})
            self.nodes.append(Node(value.name, "aten::full", given, (value,), node.stack, full, node.autocast))
            number = Ref(value.name)
        given = bind(copy, (), {"self": node.arguments["self"], "src": number})
        return replace(node, target="aten::copy_", arguments=given, overload=copy)

    def _note_views(self, node: Node) -> None:
        for out, seen in _shared(node):
            if self.values[out].dtype != self.values[seen].dtype and base_name(node.target) not in RETYPED:
                continue  # `to` has made a copy
            tensor = self._tensor(seen)
            if base_name(node.target) in VIEWS:
                self.views[out] = tensor, node
                self.seen[out] = self.writes[self._root(tensor)]
            else:
                here, there = self._root(out), self._root(tensor)
                self.perhaps[here].add(there)
                self.perhaps[there].add(here)

    def _tensor(self, name: str) -> str:
        while name in self.same:
            name = self.same[name]
        return name

    def _root(self, tensor: str) -> str:
        while tensor in self.views:
            tensor = self.views[tensor][0]
        return tensor

    def _is_kept(self, source: Source) -> bool:
        """True if a write into a tensor lasts until the next step.

        The counters of batch norms do not count: layerwise updates them itself (see `layerwise.run.state.state`).
        """
        own = source.kind != "input" and not source.target.startswith("lifted_tensor")
        return own and (source.kind == "parameter" or not source.target.endswith(COUNTER))

    def _check_kept(self, node: Node, call: Node, kept: Sequence[Source]) -> None:
        """Notes a write into parameters. Raises LayerwiseError if into a buffer, or of samples or chance."""
        made = behind(call.operands, {v.name: one for one in self.nodes for v in one.outputs if v}, ())
        read = {ref.name for one in (call, *made.values()) for ref in one.operands}
        fed = any(name in self.sources and self.sources[name].kind == "input" for name in read)
        drawn = any(o and torch.Tag.nondeterministic_seeded in o.tags for one in made.values() if (o := one.overload))
        for source in kept:
            written = f"{source.kind} {source.target!r}"
            if source.kind != "parameter" or drawn or fed:
                raise LayerwiseError(
                    f"{where(node.stack)} writes into its {written} in the forward pass, which layerwise would lose "
                    "(except running statistics of batch and instance norms): update it outside the model"
                )
            path = where(node.stack).removeprefix("the model")
            self.effects[
                f"writes into its {written} in the forward pass{path and f' of {path}'} (do it after optimizer.step())"
            ] = None

    def _renamed(self, value: object) -> object:
        if isinstance(value, Ref):
            return Ref(self.current(value.name))
        return tuple(self._renamed(v) for v in value) if isinstance(value, tuple) else value


def _shared(node: Node) -> Iterator[tuple[str, str]]:
    """The outputs that may share memory with an operand, by the operator's schema: (output, operand)."""
    schema = None if node.overload is None else node.overload._schema
    if schema is not None and any(r.alias_info is not None for r in schema.returns):
        for argument in schema.arguments:
            seen = node.arguments.get(argument.name)
            if argument.alias_info is not None and isinstance(seen, Ref):
                yield from ((v.name, seen.name) for v in node.outputs if v)


def _seen_elsewhere(node: Node, name: str) -> LayerwiseError:
    return LayerwiseError(
        f"{where(node.stack)} calls {node.target}, which writes in place into a view of a tensor that is used again "
        f"({name}): write it without the underscore or out="
    )
