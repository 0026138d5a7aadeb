"""A model of which a part is on the meta device, such as its parameters but not its buffers, is traced there."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def all_on_meta(model: nn.Module) -> Iterator[None]:
    """Within it tensors that have values are stood in for, where others have none. `value_of` knows for which."""
    tensors = [*model.parameters(), *model.buffers()]
    if not any(t.is_meta for t in tensors) or all(t.is_meta for t in tensors):
        yield
        return
    made: dict[int, Tensor] = {}
    swapped: list[tuple[MutableMapping[str, Any], str, Tensor]] = []
    for module in model.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for name, tensor in held.items():
                if isinstance(tensor, Tensor) and not tensor.is_meta:
                    swapped.append((held, name, tensor))
    try:
        for place, name, tensor in swapped:
            place[name] = made.setdefault(id(tensor), _stand_in(tensor))
        yield
    finally:
        for place, name, tensor in swapped:
            place[name] = tensor


def value_of(tensor: Tensor) -> Tensor:
    """The tensor itself, or that which it stands in for."""
    known: Tensor = getattr(tensor, "layerwise_value", tensor)
    return known


def _stand_in(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    made = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    made.layerwise_value = tensor.detach()  # type: ignore[attr-defined]
    return made
