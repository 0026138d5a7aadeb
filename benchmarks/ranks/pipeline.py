"""Pipeline parallelism: stages of a module on the ranks of torch.distributed, GPipe's schedule, one device's numbers.

A pipeline is no plan: its ranks hold whole layers and work on different samples at a time. torch.distributed.pipelining
cuts the module and runs the schedule; this adds what it does not say: where it may be cut, and which modules would not
give the numbers of one device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

from layerwise.errors import LayerwiseError

LossFunction = Callable[[Tensor, Tensor], Tensor]


class Pipelined:
    """This rank's stage of a module. Every rank makes one alike, and calls `step` alike.

    starts: the submodules (by name) with which the second stage, the third, ... begin: one less than there are ranks.
    The global batch is cut into `segments` equal parts. loss: a mean over samples. Raises LayerwiseError where the
    numbers would not be one device's.
    """

    def __init__(
        self,
        module: nn.Module,
        starts: Sequence[str],
        *,
        segments: int,
        example: Tensor,
        loss: LossFunction,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """example: a global batch of inputs; only its shape and type count."""
        ranks, batch = dist.get_world_size(group), len(example)
        check(module, starts, ranks, batch, segments)
        self.rank, self.last, self.segments = dist.get_rank(group), ranks - 1, segments
        self.device, self._group = torch.device(device), group
        whole = copy.deepcopy(module)  # torch marks the modules where it cuts
        micro = torch.zeros_like(example[: batch // segments], device=next(whole.parameters()).device)
        pipe = pipeline(whole, (micro,), split_spec=dict.fromkeys(starts, SplitPoint.BEGINNING))
        if pipe.num_stages != ranks:
            raise LayerwiseError(
                f"cutting before {', '.join(starts)} makes {pipe.num_stages} stages of the model, not {ranks}: name "
                "modules that run one after the other"
            )
        stage = pipe.build_stage(self.rank, self.device, group)
        self.module: nn.Module = stage.submod
        self._schedule = ScheduleGPipe(stage, segments, loss_fn=loss)

    def parameters(self) -> list[nn.Parameter]:
        """Of this rank's stage."""
        return list(self.module.parameters())

    def step(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Forward and backward of a global batch, which every rank gives; gradients are those of the mean loss.

        The mean loss on the last rank, None on the others.
        """
        losses: list[Tensor] = []
        if self.rank == 0:
            self._schedule.step(x.to(self.device))
        elif self.rank == self.last:
            self._schedule.step(target=y.to(self.device), losses=losses)
        else:
            self._schedule.step()
        return torch.stack(losses).mean().detach() if losses else None

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every stage's parameters and buffers on every rank, on the CPU, under the model's names."""
        mine = {name: value.detach().cpu() for name, value in self.module.state_dict().items()}
        everyone: list[dict[str, Tensor] | None] = [None] * (self.last + 1)
        dist.all_gather_object(everyone, mine, group=self._group)
        return {name: value for part in everyone for name, value in (part or {}).items()}


def check(module: nn.Module, starts: Sequence[str], ranks: int, batch: int, segments: int) -> None:
    """LayerwiseError where the module cannot be cut so, or a pipeline's numbers would not be one device's."""
    if len(starts) != ranks - 1:
        raise LayerwiseError(f"{ranks} ranks need {ranks - 1} places to cut, {len(starts)} are given")
    known = dict(module.named_modules())
    for name in starts:
        if name not in known or not name:
            raise LayerwiseError(f"a stage cannot begin with {name!r}: the model has no such module")
    if segments < 1 or batch % segments:
        raise LayerwiseError(f"a batch of {batch} samples cannot be cut into {segments} equal segments")
    for name, part in known.items():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
            raise LayerwiseError(
                f"module {name!r} normalises over the batch: a pipeline would use each segment's own statistics, which "
                "are not one device's"
            )
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p > 0:
            raise LayerwiseError(
                f"module {name!r} drops at random: a pipeline draws anew for each segment, and not as one device does; "
                "set its p to 0"
            )
