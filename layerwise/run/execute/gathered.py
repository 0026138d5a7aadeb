"""Gathered: when the parameters of layers come and go that are whole only while their layer computes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from layerwise.run.execute.autograd import ordered
from layerwise.run.execute.passes import Pass
from layerwise.run.schedule.layers import Schedule, ScheduledLayer


class Gathered:
    """Of one schedule. All ranks gather in the order of the layers, and back in the reverse, also without a part."""

    def __init__(self, schedule: Schedule) -> None:
        self._by_name = {scheduled.layer.name: scheduled for scheduled in schedule.layers}

    def begin(self, run: Pass, name: str, *, back: bool = False) -> None:
        """A layer is about to compute, or to be differentiated: its parameters are whole from here on.

        Those of the next one are on their way meanwhile.
        """
        if name not in run.gathers:
            return
        if back:
            run.gathers[name].finish_again()
        else:
            run.gathers[name].finish()
        order = [one for one in run.gathers if self._takes_part(run, one, back=back)]
        place = order.index(name)
        for following in order[:place][-1:] if back else order[place + 1 :][:1]:
            run.gathers[following].begin()

    def _begin_back(self, run: Pass, name: str) -> Sequence[Tensor]:
        """What the graph of this backward pass holds, if there is one: the layer is differentiated once more by it."""
        self.begin(run, name, back=True)
        return (run.gathers[name].mark(),)

    def _takes_part(self, run: Pass, name: str, *, back: bool) -> bool:
        scheduled = self._by_name[name]
        return scheduled.backward if back else run.training or scheduled.returned

    def in_turn(self, run: Pass, scheduled: ScheduledLayer, given: list[Tensor | None]) -> None:
        """Back, the token waits for the gradients of a layer's parameters, also where there are none.

        So all ranks begin to sum them before they come to the next layer.
        """
        own = run.gathers[scheduled.layer.name].names
        which = [i for i, name in enumerate(scheduled.parameters) if name in own]
        tensors = {i: p for i in which if (p := given[i]) is not None and p.requires_grad}
        run.token, *marked = ordered(run.token, *tensors.values())
        for i, p in zip(tensors, marked, strict=True):
            given[i] = p

    def end(self, run: Pass, scheduled: ScheduledLayer, out: Tensor | None) -> Tensor | None:
        """The layer has made `out`. Back, its parameters come once more before it is differentiated."""
        name = scheduled.layer.name
        if name not in run.gathers:
            return out
        if run.differentiate and scheduled.backward:
            again = partial(self._begin_back, run, name)
            if out is None:
                (run.token,) = ordered(run.token, at_backward=again)
            else:
                run.token, out = ordered(run.token, out, at_backward=again)
        run.gathers[name].drop(out)
        return out
