"""ModelComparison: checks that the model as written still computes what its layers do.

Whatever the model's code reads beside tensors (a clock, a file, the environment, a library's object) is fixed at the
values it had when the model was traced. No inspection finds all of it; running the model does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.torch.proof import compared
from layerwise.importers.torch.read.arguments import Arguments, Call, OutputStructure
from layerwise.importers.torch.read.fed import Fed
from layerwise.importers.torch.trace import Imported
from layerwise.importers.torch.unfused import UnlikeError, UnprovenError
from layerwise.ops.base import Role
from layerwise.run.guards.hooks import without_hooks
from layerwise.run.guards.refusals import AS_WRITTEN

STEPS = (2, 100)  # training steps, counted from when the model was made parallel


@dataclass
class ModelComparison:
    """The imported layers, to be run beside the model on two samples of a rank.

    Gradients and buffers are compared too, with the same random numbers on both sides. The comparison leaves no trace:
    the model, its buffers and all random states are as before.
    """

    graph: LayerGraph  # not fused
    structure: OutputStructure | None
    steps: int = 0  # steps begun

    def due(self) -> bool:
        """Returns True if the model is compared in the step that begins."""
        self.steps += 1
        return self.steps in STEPS

    def check(
        self, model: nn.Module, arguments: Arguments, call: Call, full: Callable[[], Mapping[str, Callable[[], Any]]]
    ) -> bool:
        """Compares them, and returns whether it could; it warns if the model cannot run. Raises LayerwiseError if they
        differ.

        Args:
            model: The user's model.
            arguments: The signature by which it is called.
            call: This rank's call in this step.
            full: Restores what the user wrote in the model, with full parameters, and returns functions that read the
                tensors that layers compute with, by name.
        """
        try:
            effects = self._effects(model, arguments, call, full())
        except UnlikeError as error:
            raise self._error(f"layer {error.layer!r} gives other numbers than the model as written") from error
        except (LayerwiseError, torch.OutOfMemoryError) as why:  # e.g. the model takes no other batch size than its own
            warnings.warn(f"the model could not be compared with its layers in step {self.steps}: {why}", stacklevel=2)
            return False
        if effects:
            raise self._error(f"the model {effects[0]}")
        return True

    def _effects(
        self, model: nn.Module, arguments: Arguments, call: Call, stored: Mapping[str, Callable[[], Any]]
    ) -> tuple[str, ...]:
        """Returns what running the model does that its layers lack. Raises UnlikeError or UnprovenError."""
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        there: Call = pytree.tree_map_only(Tensor, lambda x: x.detach().to(device), call)
        given = arguments.tensors(*there)
        fed_by_row = {id(given[x.name]) for x in self.graph.layers if x.role is Role.INPUT and x.out.index("n") == 0}
        leaves = pytree.tree_leaves(there)
        rows = frozenset(i for i, x in enumerate(leaves) if id(x) in fed_by_row)
        fed = Fed(next((len(leaves[i]) for i in rows), 0), rows)
        if not all(bool(p.isfinite().all()) for p in (*model.parameters(), *given.values())):
            raise UnprovenError("parameters or inputs are not finite")
        imported = Imported(self.graph, stored, self.structure, arguments)
        with without_hooks(model), torch.autocast(device.type, enabled=False):
            return compared(imported, model, there, fed).graph.unseen

    def _error(self, what: str) -> LayerwiseError:
        return LayerwiseError(
            f"in training step {self.steps} {what}, unlike when it was made parallel: something that its forward reads "
            "beside its inputs (a clock, a file, the environment, an object) has changed. Store a number that changes "
            f"in a parameter with requires_grad=False and write into it, or {AS_WRITTEN}; "
            "ParallelOptions(compare_model=False) turns this check off"
        )
