"""The model's own parameters as autograd's leaves, with gradients averaged over the ranks.

Autograd adds to `.grad`, which is empty during a backward pass (`Gradients`). Each gradient goes to the reducer as soon
as it is computed; at the end of the pass every parameter gets the gradient that one device would have.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from layerwise.errors import LayerwiseError
from layerwise.ops.base import Role
from layerwise.run.base import Run
from layerwise.run.execute.reducer import GradientReducer, Gradients
from layerwise.run.guards.compare_ranks import RankComparison
from layerwise.run.guards.hooks import Hooks, call_hooks, check_parameters, hook_of, outside_while_waiting, take_hooks
from layerwise.run.guards.refusals import Structure, check_frozen
from layerwise.run.local_tensor import digest


class AveragedParameters:
    """The current parameters of the user's module, on one of several ranks.

    run: the module's run, which owns this. parameters: those whose gradients are averaged, by name. unknown: those that
    the trace has not met; their gradients must be the same on all ranks, as a weight penalty's are. reducer: sums
    gradients. comparison: compares the ranks' values, if wanted.
    """

    def __init__(self, run: Run) -> None:
        self._run, module, graph, comm = weakref.ref(run), run.model, run.layer_graph, run.comm
        everyone, tensors = tuple(range(comm.size)), module.state_dict(keep_vars=True)
        order = [name for layer in reversed(graph.layers) for name in reversed(layer.parameters)]
        order += [layer.name for layer in reversed(graph.layers) if layer.role is Role.TIED]
        last = dict.fromkeys(reversed([name for name in order if isinstance(tensors.get(name), nn.Parameter)]))
        untrained = {name for layer in graph.layers for name in layer.frozen}
        names = [name for name in reversed(last) if tensors[name].requires_grad and name not in untrained]
        self.parameters: dict[str, nn.Parameter] = {name: tensors[name] for name in names}
        groups = dict.fromkeys(names, everyone)
        size = run.plan.bucket_bytes
        self.reducer = GradientReducer(self.parameters, names, groups, scale=1 / comm.size, bucket_bytes=size)
        followed = {id(p) for p in self.parameters.values()}
        self.unknown = {n: p for n, p in module.named_parameters() if p.requires_grad and id(p) not in followed}
        holders = dict.fromkeys(names, [everyone] * comm.size)
        self.comparison = (
            RankComparison(self.parameters, holders, comm.members) if run.runtime_options.compare_ranks else None
        )
        self.comm = comm
        self._structure = Structure(module, buffers=False)
        self._frozen = [(name, p) for name, p in tensors.items() if isinstance(p, nn.Parameter) and not p.requires_grad]
        self._gradients: Gradients | None = None
        self._astray: list[str] = []  # parameters that had a gradient before a pass through the model's call began
        self._nodes = {name: get_gradient_edge(p).node for name, p in self.parameters.items()}
        for name, p in {**self.parameters, **self.unknown}.items():
            take_hooks(p, hook_of(self, name))

    def check(self) -> None:
        """Raises LayerwiseError if gradients would be lost: those of other parameters, of frozen ones, or by hooks."""
        self.check_hooks()
        if self._structure.changed():
            raise LayerwiseError(
                "the model's parameters or layers changed after it was made parallel, so their gradients would not be "
                "averaged: change the model first, or parallelize it again, and do not call fully_shard"
            )
        check_frozen(self._frozen)

    def check_hooks(self) -> None:
        """Raises LayerwiseError if a parameter has a hook that would run before the sum over ranks."""
        check_parameters(self.parameters.items())

    def begin(self, gradients: Gradients) -> None:
        """Begins a backward pass through the model."""
        if self._gradients is not None:
            raise LayerwiseError(
                "a backward pass through the model runs inside another one, as torch.utils.checkpoint with "
                "use_reentrant=True does: pass use_reentrant=False"
            )
        self._gradients = gradients

    def made(self, name: str, p: nn.Parameter) -> None:
        """Takes the gradient that autograd has added to the `.grad` of a parameter."""
        if self._gradients is None or name in self.unknown:
            self._stray(name)
            return
        if name in self._gradients.made:
            raise LayerwiseError(
                f"parameter {name!r} got two gradients in one backward pass, as torch.utils.checkpoint with "
                "use_reentrant=True causes for a shared parameter: pass use_reentrant=False"
            )
        gradient, p.grad = p.grad, None
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise LayerwiseError(
                f"parameter {name!r} has a sparse gradient, which cannot be averaged over several ranks: build its "
                "embedding with sparse=False"
            )
        with torch.no_grad():
            self._gradients.add(name, gradient)

    def finish(self) -> None:
        """Ends the pass."""
        gradients, self._gradients = self._gradients, None
        for name, node in self._nodes.items():
            if gradients is not None and name not in gradients.made and _only_returned(node):
                gradients.fail()
                raise LayerwiseError(
                    f"torch.autograd.grad for parameter {name!r} would return the gradient of this rank's samples "
                    "only: call loss.backward(), which averages over the ranks, and read .grad"
                )

    def fail(self) -> None:
        """Ends the pass after an error."""
        self._gradients = None

    def release(self) -> None:
        """Gives the user's hooks back to autograd, which then calls them itself."""
        for p in (*self.parameters.values(), *self.unknown.values()):
            if isinstance(p._post_accumulate_grad_hooks, Hooks):
                p._post_accumulate_grad_hooks = p._post_accumulate_grad_hooks.users

    def _stray(self, name: str) -> None:
        """Notes a gradient that is not from the model's call, but from a weight penalty or a submodule called alone."""
        run = self._run()
        if run is None or not run.summed:
            raise outside_while_waiting(name)
        if not self._astray:
            torch.autograd.Variable._execution_engine.queue_callback(self._check_strays)
        self._astray.append(name)

    def _check_strays(self) -> None:
        """Raises LayerwiseError unless the gradients that came from outside the call are the same on all ranks."""
        names, self._astray = self._astray, []
        parameters = {**self.parameters, **self.unknown}
        ranks = self.comm.all_gather_object(
            {name: g if (g := parameters[name].grad) is None else digest(g.to_dense()) for name in names}
        )
        for name in names:
            if any(digests.get(name) != ranks[0].get(name) for digests in ranks):
                raise LayerwiseError(
                    f"parameter {name!r} got a gradient that differs between ranks, from a submodule that was called "
                    "alone or did not run when the model was made parallel: call the model itself, which averages over "
                    "the ranks, and parallelize it in the mode that you train"
                )
            call_hooks(parameters[name])


def _only_returned(node: Any) -> bool:
    """True if the running backward pass is a torch.autograd.grad that asks for this leaf."""
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd cannot answer for a leaf of autograd.grad
        return True
    return False
