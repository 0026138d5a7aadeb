"""Random networks under random plans, on two or three ranks, against PyTorch on one device.

    python -m benchmarks.random_networks                       # 500 networks, some 20 minutes on two cores
    python -m benchmarks.random_networks --first 17 --count 1  # one of them, with what it is made of

A network is drawn from its number: images, volumes, signals or sequences of odd extents through convolutions (strides,
dilation, groups, padding of every kind), transposed ones, poolings, norms, branches that are added or concatenated,
gates, resampling, attention, recurrent layers. Each trains two steps, evaluates, takes another batch, and is saved and
loaded, under a random plan (`benchmarks.zoo.compare`): loss, outputs, gradients, buffers and bytes sent are compared.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.compare import compared, reference, traced_once
from benchmarks.zoo.example import SAMPLES, Example
from benchmarks.zoo.trial import one_line
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import network_of
from tests.run.plans import random_plan

TOLERANCE = 1e-8  # in float64, relative; batch norms of few samples multiply rounding
LEAST = 3  # positions along a dimension of space that every block leaves


class Residual(nn.Module):
    """x + f(x), or x beside f(x) in channels."""

    def __init__(self, inner: nn.Module, *, added: bool) -> None:
        super().__init__()
        self.inner, self.added = inner, added

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return x + y if self.added else torch.cat([x, y], 1)


class Gate(nn.Module):
    """Channels weighed by what a network makes of their means, as in squeeze-and-excitation networks."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        w = torch.sigmoid(self.last(F.relu(self.first(x.flatten(2).mean(2)))))
        return x * w.reshape(*w.shape, *(1,) * (x.dim() - 2))


class Resized(nn.Module):
    """Interpolated to a factor, or padded and cut."""

    def __init__(self, how: str, factor: float, space: int) -> None:
        super().__init__()
        self.how, self.factor, self.space = how, factor, space

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "cut":
            return F.pad(x, (1, 2) * self.space, value=0.5)[..., 1:]
        if self.how == "nearest":
            return F.interpolate(x, scale_factor=self.factor)
        size = [max(LEAST, int(n * self.factor)) for n in x.shape[2:]]
        return F.interpolate(x, size=size, mode=self.how, align_corners=self.factor > 1)


class Attention(nn.Module):
    """Self-attention of sequences (n, s, c), causal or not."""

    def __init__(self, channels: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        n, s, c = x.shape
        q, k, v = self.qkv(x).view(n, s, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(n, s, c))


class Recurrent(nn.Module):
    """A recurrent layer's outputs."""

    def __init__(self, kind: str, channels: int, *, both: bool) -> None:
        super().__init__()
        width = channels // 2 if both else channels
        self.cells = getattr(nn, kind)(channels, width, batch_first=True, bidirectional=both)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.cells(x)[0]
        return out


class Head(nn.Module):
    """Classes of a sample, or of every position."""

    def __init__(self, channels: int, *, dense: bool) -> None:
        super().__init__()
        self.out, self.dense = nn.Linear(channels, 5), dense

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3 and not self.dense:
            return self.out(x.mean(-1))
        y: Tensor = self.out(x.flatten(2).mean(2)) if not self.dense else self.out(x.movedim(1, -1))
        return y


def network(number: int) -> Example:
    """The network of this number, in float64."""
    draw = Random(number)
    torch.manual_seed(number)
    if draw.random() < 0.25:
        model, x = _sequence(draw)
    else:
        model, x = _spatial(draw)
    return Example(model.double(), (x.double() if x.is_floating_point() else x,))


def _sequence(draw: Random) -> tuple[nn.Module, Tensor]:
    """Words or vectors through attention, recurrent layers, norms and linear layers."""
    channels, length = draw.choice((4, 8, 12)), draw.randint(3, 9)
    words = draw.random() < 0.5
    layers: list[nn.Module] = [nn.Embedding(11, channels) if words else nn.Linear(6, channels)]
    for _ in range(draw.randint(1, 4)):
        made: dict[str, Callable[[], nn.Module]] = {
            "attention": lambda: Attention(channels, draw.choice((1, 2, 4)), causal=draw.random() < 0.5),
            "recurrent": lambda: Recurrent(draw.choice(("LSTM", "GRU", "RNN")), channels, both=draw.random() < 0.3),
            "linear": lambda: nn.Sequential(
                nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels)
            ),
        }
        inner = made[draw.choice(tuple(made))]()
        layers += [Residual(inner, added=True) if draw.random() < 0.7 else inner]
        if draw.random() < 0.6:
            layers.append(draw.choice((nn.LayerNorm, nn.RMSNorm))(channels))
    layers.append(nn.Linear(channels, 5))
    x = torch.randint(11, (SAMPLES, length)) if words else torch.randn(SAMPLES, length, 6)
    return nn.Sequential(*layers), x


def _spatial(draw: Random) -> tuple[nn.Module, Tensor]:
    """Signals, images or volumes through some blocks."""
    space, channels = draw.choice((1, 2, 2, 3)), draw.randint(1, 4)
    extents = [draw.randint(6, 13 if space < 3 else 8) for _ in range(space)]
    x = torch.randn(SAMPLES, channels, *extents)
    layers: list[nn.Module] = []
    y = x
    for _ in range(draw.randint(2, 6)):
        block = _block(draw, space, y)
        try:
            with torch.no_grad():
                after = block(y)
        except (RuntimeError, ValueError):  # too few positions
            continue
        if min(after.shape[2:]) < LEAST or after.numel() > 20_000:
            continue
        layers.append(block)
        y = after
    layers.append(Head(y.shape[1], dense=draw.random() < 0.4))
    return nn.Sequential(*layers), x


def _block(draw: Random, space: int, x: Tensor) -> nn.Module:
    """One of many kinds, for an input such as x."""
    channels = x.shape[1]

    def of(name: str, *args: object, **how: object) -> nn.Module:
        made: nn.Module = getattr(nn, f"{name}{space}d")(*args, **how)
        return made

    def same(width: int) -> nn.Module:
        return of("Conv", channels, width, 3, padding=1, padding_mode=draw.choice(("zeros", "zeros", "replicate")))

    def convolution() -> nn.Module:
        groups = draw.choice([g for g in (1, 1, 2, channels) if channels % g == 0])
        return of(
            "Conv", channels, groups * draw.randint(1, 3), draw.randint(1, 4), stride=draw.choice((1, 1, 2, 3)),
            padding=draw.randint(0, 2), dilation=draw.choice((1, 1, 2)), groups=groups, bias=draw.random() < 0.7,
        )  # fmt: skip

    def transposed() -> nn.Module:
        stride = draw.choice((1, 2))
        return of(
            "ConvTranspose", channels, draw.randint(1, 4), draw.randint(2, 4), stride=stride,
            padding=draw.randint(0, 1), output_padding=draw.randint(0, stride - 1),
        )  # fmt: skip

    def pooling() -> nn.Module:
        kind, kernel = draw.choice(("MaxPool", "AvgPool")), draw.randint(2, 3)
        how = {"stride": draw.randint(1, 3), "padding": draw.randint(0, kernel // 2), "ceil_mode": draw.random() < 0.4}
        return of(kind, kernel, **how)

    def norm() -> nn.Module:
        groups = draw.choice([g for g in (1, channels) if channels % g == 0])
        kinds: tuple[Callable[[], nn.Module], ...] = (
            lambda: of("BatchNorm", channels),
            lambda: of("InstanceNorm", channels, affine=True),
            lambda: nn.GroupNorm(groups, channels),
            lambda: nn.LayerNorm(x.shape[1:]),
        )
        return draw.choice(kinds)()

    def resized() -> nn.Module:
        smooth = ("linear", "bilinear", "trilinear")[space - 1]
        return Resized(draw.choice(("nearest", smooth, "cut")), draw.choice((0.5, 2.0)), space)

    kinds: dict[str, Callable[[], nn.Module]] = {
        "convolution": convolution,
        "transposed": transposed,
        "pooling": pooling,
        "norm": norm,
        "activation": lambda: draw.choice((nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Softplus))(),
        "added": lambda: Residual(nn.Sequential(same(channels), nn.ReLU(), same(channels)), added=True),
        "beside": lambda: Residual(same(draw.randint(1, 3)), added=False),
        "gate": lambda: Gate(channels),
        "resized": resized,
    }
    return kinds[draw.choice((*kinds, "convolution", "norm"))]()


def tried(number: int) -> str:
    """What came of a network: "exact", "refused: …", "fails in PyTorch: …", or what differs."""
    draw = Random(-1 - number)
    ranks = draw.choice((2, 2, 3))
    given = network(number)
    inputs = tuple(
        torch.cat([x, *(torch.randn_like(x) if x.is_floating_point() else x.flip(1) for _ in range(ranks - 1))])
        for x in given.inputs
    )
    try:
        given.model(*inputs)
    except Exception as error:  # a block that PyTorch refuses of so few positions
        return f"fails in PyTorch: {one_line(error)}"
    try:
        imported = network_of(given.model, given.inputs, SAMPLES * ranks, f"network {number}")
        with traced_once():
            wanted = reference(given, inputs, imported)
            plan = random_plan(fuse(imported.graph), ranks, 2 * number, "sample")  # even: of equal devices
            away = compared(imported, plan, given, inputs, wanted)
    except LayerwiseError as error:
        return f"refused: {one_line(error)}"
    worst = max(away, key=lambda key: away[key] if away[key] == away[key] else float("inf"))
    if not away[worst] <= TOLERANCE:
        return f"differs: {worst} by {away[worst]:.1e}"
    return "exact" if imported.unproven is None else f"unproven: {imported.unproven}"


def main() -> int:
    """Tries --count networks; exit code 1 if any differs, is refused or raises."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--first", type=int, default=0, help="number of the first (default: 0)")
    p.add_argument("--count", type=int, default=500, help="how many (default: 500)")
    args = p.parse_args()
    torch.set_num_threads(1)
    ends = Counter[str]()
    for number in range(args.first, args.first + args.count):
        try:
            end = tried(number)
        except Exception as error:  # whatever it is: the others go on
            end = f"raises: {one_line(error)}"
        ends[end.partition(":")[0]] += 1
        if end != "exact":
            print(f"{number}: {end}", flush=True)
        if args.count == 1:
            print(network(number).model)
    print(*(f"{count} {end}" for end, count in ends.most_common()), sep=", ")
    return int(bool(set(ends) - {"exact", "fails in PyTorch"}))


if __name__ == "__main__":
    sys.exit(main())
