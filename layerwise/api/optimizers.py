"""Optimizers: what the user gives becomes an optimizer of this rank's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from layerwise.cost.compute.roofline import OPTIMIZERS as PLANNED
from layerwise.errors import LayerwiseError, nearest
from layerwise.run.guards.refusals import AS_WRITTEN
from layerwise.run.guards.replaced import parameter_now
from layerwise.run.parallel import ParallelModule, of
from layerwise.train.loop import OPTIMIZERS, Settings

OptimizerLike = str | Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]
SchedulerLike = LRScheduler | Callable[[Optimizer], LRScheduler]
# By lower-case names, because such classes come from many packages: they take a parameter as one matrix.
MATRICES = frozenset(("adafactor", "muon", "shampoo", "distributedshampoo", "soap", "galoreadamw"))
UNFIT = {"LBFGS": "is stepped with a closure", "SparseAdam": "takes sparse gradients only"}  # for `fit`'s loop


def check(optimizer: object, scheduler: object) -> None:
    """LayerwiseError for what can be no optimizer, or no scheduler of it: before the work that they are for."""
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise LayerwiseError(
                f"unknown optimizer {optimizer!r}{nearest(optimizer, OPTIMIZERS)}: there are {', '.join(OPTIMIZERS)}"
            )
    elif isinstance(optimizer, Optimizer):
        _check_kind(type(optimizer))
        if optimizer.state:
            raise LayerwiseError(
                "the optimizer has taken steps already: give one that is new, or a function that makes it"
            )
    elif not callable(optimizer):
        raise LayerwiseError(
            f"optimizer is of type {type(optimizer).__name__}: give a name, a function, or an optimizer"
        )
    elif isinstance(optimizer, type):
        _check_kind(optimizer)
    if isinstance(scheduler, LRScheduler):
        if scheduler.optimizer is not optimizer:
            raise LayerwiseError("the scheduler is of another optimizer: give fit the one that it was built over, too")
    elif scheduler is not None and not callable(scheduler):
        raise LayerwiseError(
            f"scheduler is of type {type(scheduler).__name__}: give one of torch.optim.lr_scheduler, or a function of "
            "the optimizer"
        )


def build(optimizer: OptimizerLike, module: ParallelModule) -> Optimizer:
    """Returns an optimizer over the module's parameters.

    optimizer: a name (its usual learning rate), a function of the parameters, or one over those of before the model was
    made parallel: it goes on with those of now, so its groups, settings and schedulers stay as they are.
    LayerwiseError where it is over others, and for optimizers that do not suit the plan.
    """
    if isinstance(optimizer, Optimizer):
        built = _moved(optimizer, module)
    else:
        trained = [p for p in module.parameters() if p.requires_grad]
        built = Settings(optimizer).build(trained) if isinstance(optimizer, str) else optimizer(trained)
        if not isinstance(built, Optimizer):
            raise LayerwiseError(f"optimizer= made a {type(built).__name__}; it must make a torch.optim.Optimizer")
        _check_kind(type(built))
    if (
        of(module).comm.size > 1
        and of(module).has_cut
        and any(base.__name__.lower() in MATRICES for base in type(built).__mro__)
    ):
        raise LayerwiseError(
            f"{type(built).__name__} takes a parameter as one matrix, but the plan splits the parameters over the "
            f"ranks: take an element-wise optimizer such as SGD or AdamW, or {AS_WRITTEN}"
        )
    return built


def planned(optimizer: OptimizerLike) -> str:
    """Returns the optimizer that memory is planned for: Adam's for those that are not known."""
    name = optimizer if isinstance(optimizer, str) else type(optimizer).__name__.lower()
    if isinstance(optimizer, Optimizer) and name == "sgd" and optimizer.defaults["momentum"]:
        return "momentum"
    return name if name in PLANNED else "adam"


def _check_kind(kind: type) -> None:
    """LayerwiseError for optimizers that suit no plan; what suits the plan is asked once there is one."""
    for base in kind.__mro__:
        if base.__name__ in UNFIT:
            raise LayerwiseError(
                f"{base.__name__} {UNFIT[base.__name__]}, which fit cannot: take another optimizer, such as AdamW"
            )


def _moved(optimizer: Optimizer, module: ParallelModule) -> Optimizer:
    """Returns the optimizer, over the parameters that the model has now."""
    held = {id(p) for p in module.parameters()}
    for group in optimizer.param_groups:
        now = [parameter_now(p) for p in group["params"]]
        strange = next((p for p in now if id(p) not in held), None)
        if strange is not None:
            raise LayerwiseError(
                f"the optimizer has a parameter of shape {tuple(strange.shape)} that is not the model's: build it over "
                "model.parameters(), or give a function of the parameters"
            )
        group["params"] = now
    return optimizer
