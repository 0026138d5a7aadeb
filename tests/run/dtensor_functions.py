"""Called in the ranks of test_dtensors: PyTorch's functions of parameters that a plan splits, and their gradients."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from layerwise.comm.base import Comm
from layerwise.run.state.plan_dtensor import PlanDTensor
from tests.run.dtensor_ranks import Cuts, made, original

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "equal": lambda p: torch.tensor(torch.equal(p, p.clone())),
    "allclose": lambda p: torch.tensor(torch.allclose(p, p + 1.0)),
    "argmax": lambda p: p.argmax(),
    "argmin of a dimension": lambda p: p.argmin(-1),
    "largest places": lambda p: p.topk(1, 0).indices,
    "histc": lambda p: torch.histc(p, 5),
    "bincount": lambda p: (p.flatten() * 10).abs().long().bincount(),
    "unique": lambda p: p.unique(),
    "nonzero": lambda p: p.nonzero(),
    "above zero": lambda p: p[p > 0],
    "quantile": lambda p: p.quantile(0.3),
    "median": lambda p: p.median(),
    "kthvalue": lambda p: p.flatten().kthvalue(2).values,
    "sort": lambda p: p.sort(0).values,
    "std": lambda p: p.std(unbiased=False),
    "var of a dimension": lambda p: p.var(0, unbiased=False),
    "cumsum": lambda p: p.cumsum(0),
    "logsumexp": lambda p: p.logsumexp(0),
    "norm": lambda p: p.norm(),
    "norm inf": lambda p: p.norm(float("inf")),
    "norm of a dimension": lambda p: p.norm(dim=0),
    "norms of rows": lambda p: p.norm(dim=-1).sum(),
    "any of rows": lambda p: (p > 0.3).any(0).sum(),
    "whole sums": lambda p: (p * 10).sum(0).long(),
    "norms of rows of its data": lambda p: p.data.norm(dim=-1).sum(),
    "norms of its columns": lambda p: p.mT.norm(dim=-1).sum(),
    "all are finite": lambda p: torch.stack([torch.isfinite(p).all(), (p > -9).all()]).all(),
    "largest and norm": lambda p: torch.stack([p.max(), p.sum(), p.norm()]),
    "histogram": lambda p: torch.histogram(p, 4).hist,
    "sum of no dimension": lambda p: p.sum(dim=[]),
    "mean of the last": lambda p: p.mean(-1),
    "spectral norm": lambda p: torch.linalg.matrix_norm(p, 2),
    "trace": lambda p: p.trace(),
    "triangle": lambda p: p.tril(),
    "gram": lambda p: p @ p.T,
    "flip": lambda p: p.flip(0) * p,
    "roll": lambda p: p.roll(1, 0),
    "cdist": lambda p: torch.cdist(p, p * 2),
    "cosine": lambda p: F.cosine_similarity(p, p.flip(0), dim=-1),
    "normalize": lambda p: F.normalize(p, dim=0),
    "softmax": lambda p: p.softmax(0),
    "mse_loss": lambda p: F.mse_loss(p, torch.ones_like(p)),
    "smooth_l1_loss": lambda p: F.smooth_l1_loss(p, torch.ones_like(p)),
    "renorm": lambda p: p.renorm(2, 0, 0.5),
    "reshape": lambda p: p.reshape(2, -1),
    "unbind": lambda p: p.unbind(0)[-1],
    "total variation": lambda p: p.diff(dim=0).abs().sum(),
    "pad": lambda p: F.pad(p, (1, 1)),
    "where": lambda p: torch.where(p > 0, p, 0.0),
}


SEVERAL = ("first.weight", "second.bias", "head.weight")  # of four dimensions, of one, and on one rank


def put(p: Tensor) -> None:
    """Writes where its own numbers say, which DTensor cannot."""
    with torch.no_grad():
        p[p.flatten(1).norm(dim=1) < p.norm() / p.shape[0] ** 0.5] = 0.0
        p.view(-1)[p.abs().view(-1).topk(2).indices] = 3.0


def other(comm: Comm, cuts: Cuts) -> list[str]:
    """Those that are others of a parameter than of what one device has, on this rank."""
    module, single = made(comm, cuts), dict(original().named_parameters())
    return [
        f"{what}{', with a gradient' * grad} of {name}"
        for name, p in ((name, module.get_parameter(name)) for name in SEVERAL)
        for what, function in FUNCTIONS.items()
        for grad in (False, True)
        if not all(_alike(here, there) for here, there in _pairs(function, p, single[name], grad=grad))
    ]


def written(comm: Comm, cuts: Cuts) -> list[str]:
    """Parameters that are others than one device's where it is written to them by places, on this rank."""
    module, single, found = made(comm, cuts), dict(original().named_parameters()), list[str]()
    for name in ("second.weight", "head.weight"):
        p, q = module.get_parameter(name), single[name].detach().clone()
        put(p)
        put(q)
        found += [name] * (not _alike(p, q))
    return found


def _pairs(
    function: Callable[[Tensor], Tensor], p: Tensor, single: Tensor, *, grad: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    q = single.detach().clone().requires_grad_()
    with torch.set_grad_enabled(grad):
        try:
            wanted = function(q)
            if wanted.requires_grad:
                wanted.square().sum().backward()
        except (RuntimeError, IndexError):  # not of so many dimensions, or without a derivative
            return
        result = function(p)
        yield result, wanted
    if q.grad is not None:
        p.grad = None
        result.square().sum().backward()
        assert p.grad is not None
        yield p.grad, q.grad
        p.grad = None


def _alike(here: Tensor, there: Tensor) -> bool:
    found = here.full_tensor() if isinstance(here, PlanDTensor) else here
    return found.shape == there.shape and torch.allclose(found.double(), there.double(), rtol=1e-9, atol=1e-12)
