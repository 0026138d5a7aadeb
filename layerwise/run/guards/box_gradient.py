"""BoxGradient: the gradient of a parameter of which this rank may hold a part only; sums over it are refused.

Element by element it is used as any tensor: optimizers, accumulation, clipping by value. Its norm would be that of a
part, another one on every rank, and a loop that scales by it would train every rank differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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
SCALER = "_amp_foreach_non_finite_check_and_unscale_"


class BoxGradient(Tensor):
    """What is computed of one is one again; `clone()` is a plain tensor, as are copies and what is saved."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """LayerwiseError for what needs all of the gradient."""
        name = getattr(func, "__name__", "")
        if name in WHOLE or name.startswith("linalg_"):
            raise LayerwiseError(
                f"{name.strip('_').removeprefix('linalg_')}() of a gradient: the plan splits the parameters over the "
                "ranks, so this one has a part of it only. To clip, or to know the norm, call "
                "model.clip_grad_norm_(max_norm); p.grad.clone() is a plain tensor of this rank's part"
            )
        if name == SCALER:
            raise LayerwiseError(
                "GradScaler looks for gradients that are not finite on this rank only, but the plan splits the "
                "parameters over the ranks: leave it out, or parallelize with strategy='data'"
            )
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        if name == "clone" or name.endswith("_like") or name.startswith("new_"):
            return made
        if isinstance(made, Tensor) and not any(made is given for given in args):
            return made.as_subclass(cls)
        if type(made) in (list, tuple) and name != "__reduce_ex__":
            return type(made)(m.as_subclass(cls) if type(m) is Tensor else m for m in made)
        return made

    def __format__(self, spec: str) -> str:
        return format(plain(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return plain(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def plain(gradient: Tensor) -> Tensor:
    """This rank's part, in the same place, as a tensor like any other."""
    return gradient.as_subclass(Tensor) if isinstance(gradient, BoxGradient) else local_part(gradient)
