"""What the loops are given: a network, its data, and how to make the network parallel or leave it alone."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import layerwise
from layerwise.comm.base import Comm

BATCH, STEPS = 8, 3
# Space, output channels and the contraction dimension split; every rank holds parts of parameters.
SPLIT = {"first": {"h": 2}, "second": {"c": 2}, "hidden": {"c": 2}, "head": {"k": 2}}
IMAGES = {"first": {"c": 2}, "second": {"h": 2}}


class Net(nn.Module):
    """Convolutions, batch norm, linear layers; an attribute, a method and a configuration of its own."""

    def __init__(self, seed: int = 0, *, smooth: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        # No bias before a batch norm: its gradient is zero but for rounding, and Adafactor would magnify that.
        self.first = nn.Conv2d(1, 4, 3, padding=1, bias=smooth)
        self.norm = nn.Identity() if smooth else nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, stride=2)
        self.hidden, self.head = nn.Linear(64, 12), nn.Linear(12, 10)
        self.config = {"classes": 10}
        self.double()

    def classes(self) -> int:
        """Of the images."""
        return int(self.config["classes"])

    def save_pretrained(self, file: str) -> None:
        """As Hugging Face's models have it."""
        torch.save(self.state_dict(), file)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.softplus(self.norm(self.first(x)))
        x = torch.tanh(self.second(x)).flatten(1)
        return self.head(torch.tanh(self.hidden(x)))


class Cast(Net):
    """In float32, with a part in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.softplus(self.norm(self.first(x)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.tanh(self.second(x)).flatten(1)
            x = torch.tanh(self.hidden(x))
        return self.head(x.float())


class Generator(nn.Module):
    """Images of images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Supervised(nn.Module):
    """Two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.first(x))
        return x, self.second(x)


class Inceptive(nn.Module):
    """An auxiliary head in training, as GoogLeNet has it; probabilities in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.auxiliary, self.head = nn.Linear(4, 10), nn.Linear(4, 10)
        self.double()

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.first(x))
        out = self.head(torch.relu(self.second(x)).mean((2, 3)))
        return {"out": out, "auxiliary": self.auxiliary(x.mean((2, 3)))} if self.training else out.softmax(1)


class Tied(nn.Module):
    """A weight that two layers share; norms of layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first, self.norm = nn.Linear(64, 12), nn.LayerNorm(12)
        self.second, self.head = nn.Linear(12, 12), nn.Linear(12, 10)
        self.third = nn.Linear(12, 12)
        self.third.weight = self.second.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x.flatten(1))))
        return self.head(torch.tanh(self.third(torch.tanh(self.second(x)))))


class Pruned(Net):
    """With a layer that is pruned before."""

    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.hidden, "weight", 0.5)  # type: ignore[no-untyped-call]


class Balanced(Net):
    """Keeps a loss of its own, as routers of experts do."""

    balance: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        self.balance = out.logsumexp(1).square().mean()
        return out


class Labelled(Net):
    """With labels it returns a loss, as Hugging Face's models do."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        out: Tensor = super().forward(x)
        return out if labels is None else (nn.functional.cross_entropy(out, labels), out)


@dataclass(frozen=True)
class Setting:
    """One rank's, or one device's (`comm` None)."""

    comm: Comm | None = None
    # "data" or "split"; "recompute": what is split is recomputed; "shared": states, too, of split samples;
    # "fewer": every other layer that is split is on rank 0 alone.
    strategy: str = "data"

    @property
    def rank(self) -> int:
        return 0 if self.comm is None else self.comm.rank

    @property
    def last(self) -> bool:
        """Whether it has a batch's last sample."""
        return self.comm is None or self.rank == self.comm.size - 1

    def share(self, x: Tensor) -> Tensor:
        """This rank's samples of a batch."""
        return x if self.comm is None else x.chunk(self.comm.size)[self.comm.rank]

    def parallel(self, model: nn.Module, split: Any = SPLIT, *, labels: bool = False, **how: Any) -> Any:
        """As a user's script has it. split: where layers are split. labels: it is called with them in training."""
        if self.comm is None:
            return model
        example = self.share(batch(0)[0]).to(next(model.parameters()).dtype)
        if self.strategy == "recompute":
            split = {name: degrees | {"recompute": True} for name, degrees in split.items()}
        if self.strategy == "shared":
            states = itertools.cycle(("sharded", "gathered"))
            split = {name: {"n": 2, "states": next(states), "recompute": True} for name in split}
        if self.strategy == "fewer":
            split = {name: degrees if i % 2 else {} for i, (name, degrees) in enumerate(split.items())}
        strategy: Any = "data" if self.strategy == "data" else split
        return layerwise.parallelize(
            model,
            (example, self.share(batch(0)[1])) if labels else example,
            strategy=strategy,
            options=layerwise.ParallelOptions(comm=self.comm, measure_s=0, verbose=False),
            **how,
        )

    def net(self, seed: int = 0, **options: Any) -> Any:
        return self.parallel(Net(seed, **options))

    def batches(self, steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(steps):
            x, y = batch(step)
            yield self.share(x), self.share(y)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """All ranks' samples."""
    draw = torch.Generator().manual_seed(step + 1)
    x = torch.randn(BATCH, 1, 8, 8, generator=draw, dtype=torch.float64)
    return x, torch.randint(0, 10, (BATCH,), generator=draw)


def whole(model: nn.Module) -> Mapping[str, Tensor]:
    """All of its state."""
    full = getattr(model, "full_state_dict", model.state_dict)
    return {f"state.{name}": value.detach().clone() for name, value in full().items()}
