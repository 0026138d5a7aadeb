"""Fed: which of the inputs of a call have a row a sample."""

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
    """A call's inputs: how many samples it has, and which of its leaves have a row for each."""

    batch: int
    rows: frozenset[int]
    shared: tuple[str, ...] = ()  # inputs as long as the batch that are the same for all samples
    found: bool = False  # whether running the model told so
    uneven: tuple[int, ...] = ()  # leaves of the outputs that are numbers, but neither mean nor sum of those of parts

    def map(self, act: Callable[[Tensor], Tensor], call: Call) -> Call:
        """The call with `act` of each input that has a row a sample."""
        leaves, tree = pytree.tree_flatten(call)
        made: Call = pytree.tree_unflatten([act(x) if i in self.rows else x for i, x in enumerate(leaves)], tree)
        return made


def fed_by(model: nn.Module, call: Call, shared: Collection[str] = ()) -> Fed:
    """The inputs that may have a row a sample: all as long as the batch, but for those that are said to be shared."""
    arguments = Arguments(signature_of(model), call, 0).leaves if shared else {}
    named = {path: leaf.value for path, leaf in arguments.items()}
    unknown = next((name for name in shared if not any(_within(path, name) for path in named)), None)
    if unknown is not None:
        raise LayerwiseError(f"shared= names {unknown!r}, and the model is called with {', '.join(named)}")
    said = {id(x) for path, x in named.items() if any(_within(path, name) for name in shared)}
    leaves = pytree.tree_leaves(call)
    batch = samples_in(x.shape for x in leaves if isinstance(x, Tensor) and id(x) not in said)
    rows = (i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.dim() and len(x) == batch)
    return Fed(batch, frozenset(i for i in rows if id(leaves[i]) not in said), tuple(shared))


def _within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}[")
