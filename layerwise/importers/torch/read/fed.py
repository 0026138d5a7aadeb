"""Fed: which inputs of a call have a row a sample."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError
from layerwise.importers.torch.read.arguments import Arguments, Call, signature_of
from layerwise.importers.torch.traced_program import samples_in


@dataclass(frozen=True, slots=True)
class Fed:
    """A call's inputs: the number of samples, and which leaves have a row for each."""

    batch: int
    rows: frozenset[int]
    shared: tuple[str, ...] = ()  # inputs that all samples share, though as long as the batch
    found: bool = False  # whether running the model showed that
    uneven: tuple[int, ...] = ()  # output leaves that are numbers, but neither mean nor sum over parts of the samples

    def map(self, act: Callable[[Tensor], Tensor], call: Call) -> Call:
        """The call with `act` applied to each input that has a row a sample."""
        leaves, tree = pytree.tree_flatten(call)
        made: Call = pytree.tree_unflatten([act(x) if i in self.rows else x for i, x in enumerate(leaves)], tree)
        return made


def fed_by(model: nn.Module, call: Call, shared: Collection[str] = ()) -> Fed:
    """The inputs that may have a row a sample: all as long as the batch, except those named as shared."""
    arguments = Arguments(signature_of(model), call, 0).leaves if shared else {}
    named = {path: leaf.value for path, leaf in arguments.items()}
    unknown = next((name for name in shared if not any(_within(path, name) for path in named)), None)
    if unknown is not None:
        raise LayerwiseError(f"shared= names {unknown!r}, but the model's inputs are {', '.join(named)}")
    said = {id(x) for path, x in named.items() if any(_within(path, name) for name in shared)}
    leaves = pytree.tree_leaves(call)
    batch = samples_in(x.shape for x in leaves if isinstance(x, Tensor) and id(x) not in said)
    rows = (i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.dim() and len(x) == batch)
    return Fed(batch, frozenset(i for i in rows if id(leaves[i]) not in said), tuple(shared))


def _within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}[")
