"""This rank's part of a parameter or gradient, which may be a DTensor.

It avoids importing torch.distributed.tensor, which takes 0.7 s and which most plans do not need.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

Version = tuple[int, int]


def is_dtensor(tensor: Tensor) -> bool:
    """True if the tensor is a DTensor: other ranks have other parts of it."""
    return hasattr(tensor, "_local_tensor")


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor, in the same memory and outside autograd; any other tensor unchanged."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def version(tensor: Tensor) -> Version:
    """Returns how often the tensor was written to, counting writes to a DTensor and to its local tensor."""
    return tensor._version, local_tensor(tensor)._version


def digest(tensor: Tensor) -> int:
    """Returns a checksum of the bits of the tensor's elements."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)


def like(tensor: Tensor, local: Tensor) -> Tensor:
    """Returns a DTensor laid out like `tensor`, with this local tensor on this rank, which may have another type."""
    spec: Any = tensor._spec  # type: ignore[attr-defined]
    if spec.tensor_meta.dtype != local.dtype:
        spec = type(spec)(spec.mesh, spec.placements, spec.tensor_meta._replace(dtype=local.dtype))
    kind: Any = type(tensor)  # built as FSDP2 does; `from_local` would go through autograd
    dtensor: Tensor = kind(local, spec, requires_grad=False)
    return dtensor


def place_gradient(p: nn.Parameter) -> None:
    """Moves a DTensor's gradient, as autograd has made it, to the parameter's device."""
    gradient: Any = p.grad
    where: Any = p
    alike = type(gradient) is type(where) and gradient._spec.placements == where._spec.placements
    if gradient is not None and not (alike and gradient.device_mesh == where.device_mesh):
        p.grad = where.bring(gradient)
