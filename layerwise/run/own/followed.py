"""Followed: the parameters of the user's module, the gradients of which are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import LayerGraph
from layerwise.ops.base import Role
from layerwise.run.execute.reducer import GradientReducer
from layerwise.run.guards.alike import Alike
from layerwise.run.guards.changes import Structure, check_frozen
from layerwise.run.guards.hooks import check_parameters
from layerwise.run.own.leaves import Leaves


class Followed:
    """As they are now, on one of several ranks.

    leaves: what autograd makes of them. reducer: sums that up. alike: compares the ranks' values, where wanted.
    """

    def __init__(
        self,
        module: nn.Module,
        graph: LayerGraph,
        comm: Comm,
        *,
        compare: bool,
        summed: Callable[[], bool],
        bucket_bytes: int,
    ) -> None:
        """compare: whether the ranks' values are. summed: whether gradients are averaged at present."""
        everyone, held = tuple(range(comm.size)), module.state_dict(keep_vars=True)
        order = [name for layer in reversed(graph.layers) for name in reversed(layer.parameters)]
        order += [layer.name for layer in reversed(graph.layers) if layer.role is Role.TIED]
        last = dict.fromkeys(reversed([name for name in order if isinstance(held.get(name), nn.Parameter)]))
        untrained = {name for layer in graph.layers for name in layer.frozen}
        names = [name for name in reversed(last) if held[name].requires_grad and name not in untrained]
        parameters = {name: held[name] for name in names}
        groups = dict.fromkeys(names, everyone)
        self.reducer = GradientReducer(parameters, names, groups, scale=1 / comm.size, bucket_bytes=bucket_bytes)
        followed = {id(p) for p in parameters.values()}
        unknown = {n: p for n, p in module.named_parameters() if p.requires_grad and id(p) not in followed}
        self.leaves = Leaves(parameters, unknown, comm, summed)
        self.alike = Alike(parameters, dict.fromkeys(names, [everyone] * comm.size), comm.size) if compare else None
        self._structure = Structure(module, buffers=False)
        self._frozen = [(name, p) for name, p in held.items() if isinstance(p, nn.Parameter) and not p.requires_grad]

    def check(self) -> None:
        """LayerwiseError where gradients would be lost: of other parameters, of frozen ones, by hooks."""
        self.check_hooks()
        if self._structure.changed():
            raise LayerwiseError(
                "the model has other parameters or layers than when it was made parallel, whose gradients nobody "
                "averages: change the model before, or make it parallel again; leave fully_shard out"
            )
        check_frozen(self._frozen)

    def check_hooks(self) -> None:
        """LayerwiseError where a parameter has a hook that would be called before the sum."""
        check_parameters(self.reducer.parameters.items(), partial_sums=True)
