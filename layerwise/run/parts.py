"""This rank's part of a parameter or gradient, which may be a DTensor.

Without an import of torch.distributed.tensor, which takes 0.7 s and which most plans do not need.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

Version = tuple[int, int]


def is_dtensor(tensor: Tensor) -> bool:
    """Whether other ranks have other parts of it."""
    return hasattr(tensor, "_local_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in the same memory and outside autograd; any other tensor is itself."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def version(tensor: Tensor) -> Version:
    """How often it was written to. Functions of a DTensor count in it alone, those of this rank's part in that."""
    return tensor._version, local_part(tensor)._version


def like(tensor: Tensor, local: Tensor) -> Tensor:
    """The DTensor that lies as this one does, and has this part on this rank."""
    kind: Any = type(tensor)  # as FSDP2 makes them; `from_local` goes through autograd
    made: Tensor = kind(local, tensor._spec, requires_grad=False)  # type: ignore[attr-defined]
    return made


def lie_as(p: nn.Parameter) -> None:
    """Brings the gradient of a DTensor, as autograd has made it, to where the parameter is."""
    gradient: Any = p.grad
    where: Any = p
    bring = getattr(where, "bring", None)  # one of some ranks
    if gradient is None or (
        gradient.placements == where.placements
        and gradient.device_mesh == where.device_mesh
        and (bring is None or hasattr(gradient, "bring"))  # torch 2.11's autograd makes DTensors of these
    ):
        return
    p.grad = gradient.redistribute(where.device_mesh, where.placements) if bring is None else bring(gradient)
