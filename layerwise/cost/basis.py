"""The basis of a predicted compute time: cells that were measured, the fit to them, or the analytic roofline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version

from layerwise.cost.model import CostModel, Strategy
from layerwise.cost.price import Price, measured_share
from layerwise.machine.layer_times import Conditions
from layerwise.ops.base import Stage
from layerwise.ops.nn.norm import BatchNorm

# By how much of their time two plans must differ before the model tells them apart, by what t_C rests on. These are of
# the model and not of a machine, so no profile holds them. They are judged: single steps are predicted worse
# (docs/benchmarks/predictions.md: 3.5 % off on average where all was measured), but much of that is common to two plans
# and cancels in their ratio. What is fitted errs as cells held out of the fit do, and at least as what is analytic.
MEASURED_ERROR, ANALYTIC_ERROR = 0.01, 0.03


@dataclass(frozen=True, slots=True)
class Basis:
    """The basis of a strategy's t_C."""

    measured: float  # shares of t_C, which make 1
    fitted: float
    analytic: float
    of_step: float  # t_C's share of the step time
    conditions: Conditions | None  # of the times that were used
    held_out_error: float | None  # of the fit

    def as_dict(self) -> dict[str, object]:
        """For `--json` and a plan's provenance."""
        return asdict(self)


def basis(model: CostModel, cost: Price) -> Basis:
    """The basis of one priced strategy."""
    total = sum(p.seconds["compute"] for p in cost.layers.values())
    known = sum(p.measured_s for p in cost.layers.values()), sum(p.fitted_s for p in cost.layers.values())
    measured, fitted = (seconds / total if total else 0.0 for seconds in known)
    times = None if model.measurements is None else model.measurements.times
    return Basis(
        measured,
        fitted,
        max(0.0, 1.0 - measured - fitted),
        total / cost.step_time_s if cost.step_time_s else 0.0,
        None if times is None else times.conditions,
        None if times is None else times.held_out_error,
    )


def model_error(model: CostModel, strategy: Strategy) -> float:
    """The share of a step's time below which a gain by this plan, or over it, is none; of two plans the larger one."""
    if model.measurements is None:
        return ANALYTIC_ERROR
    share = measured_share(model, strategy)
    return share * MEASURED_ERROR + (1 - share) * unmeasured_error(model)


def unmeasured_error(model: CostModel) -> float:
    """`model_error` where no layer was measured, and the most that it can be: what the fit errs by, where that is more
    than a roofline is taken to.
    """
    held_out = None if model.measurements is None else model.measurements.times.held_out_error
    return max(ANALYTIC_ERROR, held_out or 0.0)


def describe(model: CostModel, shares: Basis) -> str:
    """`t_C (62% of the step time): 97% measured on X (float32, torch 2.13.0), 3% fitted, none analytic.`"""
    processor, where = model.devices.processor, shares.conditions
    if where is None:
        return (
            f"t_C is not measured but an analytic roofline of {processor.name} at {model.options.dtype} "
            f"(profile {model.devices.name}; layerwise measure layers makes one of your machine)."
        )
    parts = [f"{_percent(shares.measured)} measured on {where.device} ({', '.join(_modes(where))})"]
    error = "" if shares.held_out_error is None else f" (median error {shares.held_out_error:.1%} on cells held out)"
    parts.append(f"{_percent(shares.fitted)} fitted to that{error}")
    parts.append(f"{_percent(shares.analytic)} an analytic roofline")
    return f"t_C is {shares.of_step:.0%} of the step time: {'; '.join(parts)}."


def warnings(model: CostModel) -> Iterator[str]:
    """Warnings of what cannot be trained, and of measured times for another element type, device or version."""
    if single := [layer.name for layer in model.graph.layers if any(map(_of_one_number, layer.stages))]:
        yield (
            f"WARNING: PyTorch will not train layer {single[0]!r}: its batch norm has one number of each channel, and "
            "needs two: give larger samples, or more of them (--global-batch)."
        )
    sets, dtype = model.devices.layers, model.options.dtype
    if not sets:
        return
    if model.measurements is None:
        known = ", ".join(dict.fromkeys(one.conditions.dtype for one in sets))
        yield f"WARNING: profile {model.devices.name} has times of layers at {known} only; at {dtype} t_C is analytic."
        return
    where, installed = model.measurements.times.conditions, version("torch")
    if _release(where.torch) != _release(installed):
        yield f"WARNING: layers were measured with torch {where.torch}, and here is {installed}: measure again."
    if where.device != model.devices.processor.name:
        yield (
            f"WARNING: layers were measured on {where.device}, and profile {model.devices.name} describes "
            f"{model.devices.processor.name}."
        )


def _of_one_number(stage: Stage) -> bool:
    out = stage.space.out
    return isinstance(stage.op, BatchNorm) and out.volume == out.shape[1]


def _release(torch: str) -> str:
    """A version of PyTorch without `+cpu`: which build it is says the device."""
    return torch.partition("+")[0]


def _modes(where: Conditions) -> Iterator[str]:
    yield where.dtype
    yield f"torch {where.torch}"
    if where.threads:
        yield f"{where.threads} thread{'s' * (where.threads > 1)}"
    if where.tf32 != "off":
        yield f"TF32 {where.tf32}"
    for name in ("channels_last", "cudnn_benchmark"):
        if getattr(where, name):
            yield name.replace("_", " ")


def _percent(share: float) -> str:
    return f"{share:.0%}" if share > 0 else "none"
