"""Recorded calls: the calls of a model within something larger, as `vae.decode` calls its decoder chunk by chunk.

What a call writes into the lists and dicts among its arguments, a cache from frame to frame, it returns, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from layerwise.errors import LayerwiseError, first_line
from layerwise.importers.torch.read.arguments import Arguments, Call, signature_of
from layerwise.importers.torch.read.reached import unchanged
from layerwise.importers.torch.traced_program import TRACING

Written = tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...]  # by list or dict, places and what is there now
Key = frozenset[tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call with tensors on the meta device, and the leaves of what it returns that stay with the ranks as boxes."""

    key: Key
    call: Call
    carried: frozenset[int]
    times: int = 1  # that it is made
    returned_bytes: int = 0  # of what else it returns, once
    unread: Mapping[int, Tensor] = field(
        default_factory=dict
    )  # of `carried`: what no call computes with, on the meta device


def recorded(model: nn.Module, act: Callable[[], object]) -> list[RecordedCall]:
    """Returns the unlike calls of the model while `act` runs, on shapes alone, in their order.

    LayerwiseError where that asks for values, or does not call the model.
    """
    made = dict[Key, tuple[Call, set[int], list[Any]]]()
    read = dict[Key, set[int]]()  # leaves of what a call returned that another computes with
    calls = list[tuple[Key, list[Any]]]()  # each with the leaves of what it returned
    fed = list[Any]()  # keeps what was given, so that no other has its id
    signature = signature_of(model)

    def record(forward: Callable[..., Any], call: Call) -> tuple[Any, Written]:
        given = pytree.tree_leaves(call)
        fed.append(given)
        ids = set(map(id, given))
        for key, leaves in calls:
            made[key][1].update(i for i, x in enumerate(leaves) if isinstance(x, Tensor) and id(x) in ids)
        now: Call = pytree.tree_map_only(Tensor, _on_meta, call)
        arguments = Arguments(signature, now, 0)
        key = key_of(arguments, now)
        with _Reads() as reads:
            result, written = _with_written(forward, call, arguments)
        for other, leaves in calls:
            read[other].update(i for i, x in enumerate(leaves) if id(x) in reads.ids)
        leaves = pytree.tree_leaves((result, written))
        read.setdefault(key, set())
        kept = len(pytree.tree_leaves(result))
        made.setdefault(key, (now, set(), leaves))[1].update(
            i for i, x in enumerate(leaves) if i >= kept and isinstance(x, Tensor)
        )
        calls.append((key, leaves))
        return result, written

    with TRACING:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
    watched = _replaced(model, lambda own: lambda *args, **named: record(own, (args, named))[0])
    try:
        with mode, torch.no_grad(), unchanged(model), watched:
            act()
    except LayerwiseError:
        raise
    except Exception as error:  # whatever the user's code meets
        raise LayerwiseError(
            f"what calls the model cannot be run on shapes alone: {type(error).__name__}: {first_line(error)}; give "
            "example_inputs the tensors that the model is called with"
        ) from error
    if not made:
        raise LayerwiseError("example_inputs is a function that does not call the model")
    found, times = list[RecordedCall](), Counter(key for key, _ in calls)
    for key, (call, carried, leaves) in made.items():
        sizes = (x.nbytes for i, x in enumerate(leaves) if i not in carried and isinstance(x, Tensor))
        unread = {i: _on_meta(leaves[i]) for i in carried - read[key]}
        found.append(RecordedCall(key, call, frozenset(carried), times[key], sum(sizes), unread))
    return found


def unlike(calls: Sequence[RecordedCall]) -> bool:
    """Whether a model is called in several ways, or keeps state from call to call: every way then has a plan."""
    return len(calls) > 1 or bool(calls[0].carried)


def _on_meta(x: Tensor) -> Tensor:
    with torch.utils._python_dispatch._disable_current_modes():
        return torch.empty(tuple(map(int, x.shape)), dtype=x.dtype, device="meta")


def key_of(arguments: Arguments, call: Call) -> Key:
    """Returns a call's key: names, shapes and types of its tensors, other values, lists and dicts to write into."""
    kinds = tuple(type(x).__name__ for x in _containers(arguments.bound(*call)))
    leaves = arguments.named(*call).items()
    each = ((path, tuple(x.shape), x.dtype) if isinstance(x, Tensor) else (path, repr(x)) for path, x in leaves)
    return frozenset([("lists and dicts", kinds), *each])


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the tensors that operators are given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ids = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ids.update(map(id, pytree.tree_leaves((args, kwargs))))
        return func(*args, **(kwargs or {}))


@contextmanager
def returning_written(model: nn.Module, unread: Collection[int]) -> Iterator[None]:
    """Within it a call of the model returns a pair: what it returns, and what it writes into its lists and dicts.

    unread: leaves of that, in place of which None is returned.
    """
    signature = signature_of(model)

    def made(own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **named: Any) -> Any:
            pair = _with_written(own, (args, named), Arguments(signature, (args, named), 0))
            return with_leaves(pair, dict.fromkeys(unread))

        return forward

    with _replaced(model, made):
        yield


@contextmanager
def _replaced(model: nn.Module, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    before, own = vars(model).get("forward"), model.forward
    vars(model)["forward"] = wraps(own)(made(own))
    try:
        yield
    finally:
        del vars(model)["forward"]
        if before is not None:
            vars(model)["forward"] = before


def _with_written(forward: Callable[..., Any], call: Call, arguments: Arguments) -> tuple[Any, Written]:
    held = list(_containers(arguments.bound(*call)))
    before = [_items(x) for x in held]
    result = forward(*call[0], **call[1])
    written = list[tuple[tuple[Any, ...], tuple[Any, ...]]]()
    for container, known in zip(held, before, strict=True):
        new = {place: x for place, x in _items(container).items() if place not in known or x is not known[place]}
        if len(_items(container)) < len(known):
            raise LayerwiseError("the model takes items out of a list or dict that it is given, which no plan follows")
        written.append((tuple(new), tuple(new.values())))
    return result, tuple(written)


def with_leaves(tree: Any, leaves: Mapping[int, Any]) -> Any:
    """Returns a tree with other leaves at some places."""
    known, structure = pytree.tree_flatten(tree)
    return pytree.tree_unflatten([leaves.get(i, x) for i, x in enumerate(known)], structure)


def write(bound: Mapping[str, Any], written: Written) -> None:
    """Writes into the lists and dicts among a call's arguments, by name, what the model would have written."""
    for container, (places, values) in zip(_containers(bound), written, strict=True):
        for place, value in zip(places, values, strict=True):
            if isinstance(container, list) and place == len(container):
                container.append(value)
            else:
                container[place] = value


def _containers(value: object) -> Iterator[Any]:
    """Yields the lists and dicts among arguments, and in them."""
    inside: Sequence[Any] = ()
    if isinstance(value, list | tuple):
        inside = value
    elif isinstance(value, dict):
        inside = list(value.values())
    for x in inside:
        if isinstance(x, list | dict):
            yield x
        if isinstance(x, list | dict | tuple):
            yield from _containers(x)


def _items(container: Any) -> dict[Any, Any]:
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))
