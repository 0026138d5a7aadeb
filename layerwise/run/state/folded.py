"""Folded: the buffers of a model whose values were read when it was traced, and are no layer's to read again."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.run.guards.refusals import AS_WRITTEN
from layerwise.run.local_tensor import local_tensor, version
from layerwise.run.state.initial import digest
from layerwise.run.state.state import COUNT

FEW = 64  # elements that are looked at in every call: `b.data.fill_(x)` is no new version of b


class Folded:
    """These tensors, as they are now: the plan's layers go on with their values."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        held = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] != COUNT}
        self._before = {name: (t, version(t), digest(local_tensor(t))) for name, t in held.items()}

    def check(self) -> None:
        """LayerwiseError where one has other values now."""
        for name, (tensor, before, bits) in self._before.items():
            now, local = version(tensor), local_tensor(tensor)
            if now == before and (local.numel() > FEW or local.device.type != "cpu"):
                continue
            if digest(local) != bits:
                raise LayerwiseError(
                    f"buffer {name!r} was given other values after the model was made parallel, by load_state_dict or "
                    "by hand, and the plan's layers were traced with those of before: give the model its values "
                    f"before it is made parallel, or {AS_WRITTEN}"
                )
            self._before[name] = tensor, now, bits
