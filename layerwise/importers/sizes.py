"""Resizable: a network at input sizes other than those that it is imported with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import Network, load_model, names_code, network_of
from layerwise.importers.named_code import called
from layerwise.ops.base import Role
from layerwise.ops.nn.linear import Embedding

if TYPE_CHECKING:
    from torch import nn

    from layerwise.importers.torch.read.arguments import Call

CUBES = ("cosmoflow", "unet3d")


@dataclass(frozen=True, slots=True)
class CalledGraph:
    """A way in which a model is called: its fused layers, how often, and bytes that every rank is returned in full."""

    graph: LayerGraph
    times: int = 1
    returned_bytes: float = 0.0  # of all these calls, beside what a plan counts
    io: Literal["boxes", "free"] | None = None  # what each rank feeds; None: as the question says


SMALLEST = (8, 64)  # sides tried for built-in networks: the first that a network accepts is its smallest
NAMES = {1: "sequences of {:,}", 2: "images of {:,}²", 3: "cubes of {:,}³"}


@dataclass(frozen=True, slots=True)
class Resizable:
    """A network that accepts other input sizes.

    Attributes:
        at: Returns its fused layers, of each way in which it is called, at a size. Raises LayerwiseError if it does
            not accept that size.
        dims: How many dimensions of its inputs have the size: 1 for a sequence, 2 for an image, 3 for a volume.
        size: The size of its example.
        least: The smallest size to try.
        name: The words for a size; "": those for its dimensions.
    """

    at: Callable[[int], tuple[CalledGraph, ...]]
    dims: int
    size: int
    least: int
    name: str = ""

    def text(self, size: int) -> str:
        """`sequences of 2,048`."""
        return (self.name or NAMES[self.dims]).format(size)


def sizes_of_model(spec: str, batch: int, input_shape: tuple[int, ...] | None = None) -> Resizable | None:
    """The sizes of what `load_model` loads; None if it has only one."""
    if input_shape is not None:
        channels, *sides = input_shape
        if len(sides) not in NAMES or len(set(sides)) > 1:
            return None
        return Resizable(
            lambda n: _once(load_model(spec, batch, (channels, *[n] * len(sides)))), len(sides), sides[0], 8
        )
    if names_code(spec):
        module, examples = called(spec)
        return sizes_of_module(module, (examples, {}), batch, spec)
    network, plus, loss = spec.partition("+")
    family, colon, side = network.partition(":")
    if family not in CUBES or (colon and not side.isdigit()):
        return None

    def cube(n: int) -> tuple[CalledGraph, ...]:
        return _once(load_model(f"{family}:{n}{plus}{loss}", batch))

    for least in SMALLEST:
        with suppress(LayerwiseError):
            cube(least)
            return Resizable(cube, 3, load_model(spec, batch).layers[0].out.shape[-1], least)
    return None


def sizes_of_module(module: nn.Module, call: Call, batch: int | None, name: str) -> Resizable | None:
    """The sizes of a module called this way, for the first kind of input that it accepts at another size.

    Images and volumes have equal sides. Values beyond the example's repeat it, so they stay valid.
    """
    import torch
    from torch import Tensor
    from torch.utils import _pytree as pytree

    def candidates() -> Iterator[Resizable]:
        tensors = [x for x in pytree.tree_leaves(call) if isinstance(x, Tensor)]
        for first, dims, ranks in ((1, 1, (2, 3)), (2, 1, (3,)), (2, 2, (4,)), (2, 3, (5,))):
            sides = {side for x in tensors for side in x.shape[first : first + dims]}
            if len(sides) == 1 and all(x.dim() in ranks for x in tensors):
                yield Resizable(partial(graph, range(first, first + dims)), dims, sides.pop(), 8)

    def graph(dims: range, n: int) -> tuple[CalledGraph, ...]:
        def resized(x: Tensor) -> Tensor:
            for dim in dims:
                x = x.index_select(dim, torch.arange(n, device=x.device) % x.shape[dim])
            return x

        positional, named = pytree.tree_map_only(Tensor, resized, call)
        network = network_of(module, positional, batch, name, named, trusted=True)
        _check_positions(network)
        return _once(network.graph)

    for each in candidates():
        with suppress(LayerwiseError):
            each.at(each.size + 8 if each.size < 16 else each.size // 16 * 8)
            return each
    return None


def _once(graph: LayerGraph) -> tuple[CalledGraph, ...]:
    return (CalledGraph(fuse(graph)),)


def _check_positions(network: Network) -> None:
    """Raises LayerwiseError if a position exceeds its table, which no trace shows, or if that cannot be decided.

    It handles tables of tokens that are fed, and of positions that the forward pass makes; not tables that several
    kinds of inputs or values computed from inputs look up, as these may be positions.
    """
    from layerwise.importers.torch.calls.constants import Missing

    graph, fed = network.graph, set[str]()
    for layer in graph.layers:
        for read in (network.stored.get(name) for name in (layer.name, *layer.parameters)):
            if isinstance(read, Missing):  # such as a table's rows by positions
                read()
        if isinstance(layer.op, Embedding):
            source = graph[layer.inputs[0]]
            if source.role is Role.CONSTANT:
                positions = network.constant(source.name)
                if getattr(positions, "is_meta", True) or int(positions.max()) >= layer.op.count:  # type: ignore[attr-defined]
                    raise LayerwiseError(f"table {layer.name!r} has {layer.op.count:,} rows, too few for this size")
            elif source.role is Role.INPUT:
                fed.add(source.name)
            if source.role not in (Role.CONSTANT, Role.INPUT) or len(fed) > 1:
                raise LayerwiseError(f"the indices into table {layer.name!r} may be positions")
