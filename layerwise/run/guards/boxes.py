"""Parameters of which this rank may hold a box only, and their gradients: sums over these are refused.

Element by element they are used as any tensor: optimizers, accumulation, clipping by value. Their norm would be that of
a part, another one on every rank, and a loop that scales by it would train every rank differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types

from layerwise.errors import LayerwiseError
from layerwise.run.parts import local_part

# By the names of torch's functions and methods; all of torch.linalg's, too.
WHOLE = frozenset(
    name
    for line in (
        "norm _foreach_norm nuclear_norm frobenius_norm renorm _weight_norm normalize cosine_similarity dist cdist",
        "sum nansum mean nanmean std var std_mean var_mean prod logsumexp softmax log_softmax cumsum cumprod trace",
        "cov corrcoef mse_loss l1_loss smooth_l1_loss huber_loss equal allclose histogram",
        "max min amax amin aminmax _foreach_max argmax argmin median nanmedian mode quantile nanquantile",
        "all any count_nonzero topk kthvalue sort argsort histc unique numpy __array__ tolist",
        "matmul __matmul__ __rmatmul__ mm bmm mv dot vdot inner einsum addmm addmv svd qr",
    )
    for name in line.split()
)
JOINED = frozenset(("cat", "concat", "concatenate", "hstack"))  # of parameters: one vector of all, as it were
SCALER = "_amp_foreach_non_finite_check_and_unscale_"


def _refuse(name: str, *, gradient: bool) -> None:
    """LayerwiseError where this function needs all of a parameter, or of its gradient."""
    if name in WHOLE or name.startswith("linalg_") or (name in JOINED and not gradient):
        what = "parameter"
        remedy = (
            "model.full_state_dict() has all, an optimizer's weight_decay does for a penalty; p.detach().clone() is"
        )
        if gradient:
            what = "gradient"
            remedy = "To clip, or to know the norm, call model.clip_grad_norm_(max_norm); p.grad.clone() is"
        raise LayerwiseError(
            f"{name.strip('_').removeprefix('linalg_')}() of a {what}: the plan splits the parameters over the ranks, "
            f"so this one has a part of it only. {remedy} a plain tensor of this rank's part"
        )
    if name == SCALER:
        raise LayerwiseError(
            "GradScaler looks for gradients that are not finite on this rank only, but the plan splits the "
            "parameters over the ranks: leave it out, or parallelize with strategy='data'"
        )


class _Box(Tensor):
    """What is computed of one is one again; `clone()` is a plain tensor, as are copies and what is saved."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """LayerwiseError for what needs all of it."""
        name, kind = getattr(func, "__name__", ""), BoxGradient if issubclass(cls, BoxGradient) else BoxValue
        _refuse(name, gradient=kind is BoxGradient)
        with unguarded():
            made = func(*args, **(kwargs or {}))
        if name == "clone" or name.endswith("_like") or name.startswith("new_"):
            return made
        if type(made) is Tensor and not any(made is given for given in args):
            return made.as_subclass(kind)
        if type(made) in (list, tuple) and name != "__reduce_ex__":
            return type(made)(m.as_subclass(kind) if type(m) is Tensor else m for m in made)
        return made

    def __format__(self, spec: str) -> str:
        return format(plain(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return plain(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class BoxGradient(_Box):
    """A gradient, and what is computed of it."""


class BoxValue(_Box):
    """What is computed of a parameter."""


class BoxParameter(nn.Parameter):
    """A parameter itself."""

    __torch_function__ = _Box.__torch_function__

    def __format__(self, spec: str) -> str:
        return format(plain(self), spec)


# Optimizers take their fast way for these types only; DTensor adds itself in the same way.
_foreach_supported_types.append(BoxParameter)


# Within it boxes are tensors like any other, at a quarter of the host time: for this package's own use of them.
unguarded = torch._C.DisableTorchFunctionSubclass


def plain(tensor: Tensor) -> Tensor:
    """This rank's part, in the same place, as a tensor like any other."""
    if isinstance(tensor, _Box | BoxParameter):
        with unguarded():
            return tensor.detach().as_subclass(Tensor)
    return local_part(tensor)
