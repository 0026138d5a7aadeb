"""The built-in networks: their graphs, so that planning for one imports no torch, and losses to be put behind them.

`python -m layerwise.importers` writes the graphs in `models/graphs` again, of their models: after a change of a model,
an importer or an operator. Those of any size (`mlp:8x8`, `cosmoflow:256`, `unet3d:64`) are made here. A test compares
them with their models. `unet3d:64+dice` is a network with its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING

from layerwise.errors import LayerwiseError
from layerwise.graph import graph_json
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.models import Model, find, names
from layerwise.models.cosmoflow_layers import HIDDEN, SLOPE, convolutions
from layerwise.ops.ends import Input
from layerwise.ops.nn.conv import Conv
from layerwise.ops.nn.linear import Linear
from layerwise.ops.nn.pool import AdaptivePool, Pool
from layerwise.ops.tensor.pointwise import Unary
from layerwise.ops.tensor.view import Reshape
from layerwise.tensor import TensorSpec

SAMPLES = 2  # of a graph that is written down, and of the example that a built-in network is traced with


def written_graph(name: str) -> LayerGraph | None:
    """The unfused graph of a built-in network, of SAMPLES samples; None for what is none."""
    if name not in names():
        of_size = {"mlp": _mlp, "cosmoflow": _cosmoflow, "unet3d": _unet3d}
        make = of_size.get(name.partition(":")[0]) if ":" in name else None
        return None if make is None else make(find(name))
    where = f"graphs/{name}.json"
    return graph_json.read((resources.files("layerwise.models") / where).read_text(encoding="utf-8"), where)


def _mlp(model: Model) -> LayerGraph:
    b = GraphBuilder(model.name)
    x = b.input("input", TensorSpec((SAMPLES, model.arguments[0]), ("n", "c")))
    for i, width in enumerate(model.arguments[1:]):
        if i:
            x = b.add(f"{2 * i - 1}", Unary("relu"), [x])
        x = _linear(b, f"{2 * i}", width, x)
    return b.finish([x])


def _linear(b: GraphBuilder, name: str, width: int, x: str) -> str:
    return b.add(name, Linear(width), [x], [f"{name}.weight", f"{name}.bias"])


def _cosmoflow(model: Model) -> LayerGraph:
    b, cube, none, ones = GraphBuilder(model.name), (2, 2, 2), ((0, 0),) * 3, (1, 1, 1)
    x = b.input("x", TensorSpec((SAMPLES, *model.input_shape), ("n", "c", "d", "h", "w")))
    number, channels = 0, model.input_shape[0]
    for one in convolutions(*model.arguments):
        name, channels = f"features.{number}", one.channels
        conv = Conv(channels, (one.kernel,) * 3, (one.stride,) * 3, ((one.padding, one.padding),) * 3, ones)
        x = b.add(name, conv, [x], [f"{name}.weight", f"{name}.bias"])
        x = b.add(f"features.{number + 1}", Unary("leaky_relu", (SLOPE,)), [x])
        if one.pooled:
            x = b.add(f"features.{number + 2}", Pool("average", cube, cube, none, ones), [x])
        number += 2 + one.pooled
    x = b.add("flatten", Reshape((SAMPLES, channels)), [b.add("avgpool", AdaptivePool("average", ones), [x])])
    for number, width in enumerate(HIDDEN):
        x = _linear(b, f"classifier.{2 * number}", width, x)
        x = b.add(f"classifier.{2 * number + 1}", Unary("leaky_relu", (SLOPE,)), [x])
    return b.finish([_linear(b, f"classifier.{2 * len(HIDDEN)}", 4, x)])


def _unet3d(model: Model) -> LayerGraph:
    """The graph of the other cube: no operator of it names a size."""
    written, done = written_graph("unet3d"), dict[str, Layer]()
    assert written is not None
    for layer in written.layers:
        specs, op = tuple(done[source].out for source in layer.inputs), layer.op
        if isinstance(op, Input):
            op = Input(replace(op.spec, shape=(SAMPLES, *model.input_shape)))
        done[layer.name] = replace(layer, specs=specs, op=op)
    return LayerGraph(tuple(done.values()), model.name)


if TYPE_CHECKING:
    from torch import Tensor, nn

SMOOTH = 1e-5  # as MONAI's and nnU-Net's: a class that is nowhere, and is not found, has a Dice of 1


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over samples and positions."""
    import torch.nn.functional as F

    return F.cross_entropy(logits, target)


def dice(logits: Tensor, target: Tensor) -> Tensor:
    """1 - the mean of the soft Dice of each sample and class, as MONAI's DiceLoss(softmax=True, to_onehot_y=True)."""
    import torch.nn.functional as F

    p, positions = logits.softmax(1), tuple(range(2, logits.dim()))
    t = F.one_hot(target, logits.shape[1]).movedim(-1, 1).to(p.dtype)
    both, each = (p * t).sum(positions), p.sum(positions) + t.sum(positions)
    return 1 - ((2 * both + SMOOTH) / (each + SMOOTH)).mean()


def dice_and_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Their sum, as MONAI's DiceCELoss has it."""
    return dice(logits, target) + cross_entropy(logits, target)


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ce": cross_entropy,
    "dice": dice,
    "dice+ce": dice_and_cross_entropy,
}


def parted(spec: str) -> tuple[str, str | None]:
    """The network's own name, and its loss's, if it names one."""
    name, _, loss = spec.partition("+")
    return (name, loss) if loss in LOSSES else (spec, None)


def model_with(spec: str, loss: str | None) -> str:
    """MODEL with this loss. LayerwiseError where it has one already, or is none of the built-in networks."""
    if loss is None:
        return spec
    if spec.partition(":")[0].partition("+")[0] not in names():
        raise LayerwiseError(f"model {spec!r}: --loss is for built-in networks; let yours return its loss of a target")
    if parted(spec)[1] is not None:
        raise LayerwiseError(f"model {spec!r} names its loss already: leave out --loss")
    return f"{spec}+{loss}"


def with_loss(network: nn.Module, inputs: tuple[Tensor, ...], spec: str, loss: str) -> tuple[nn.Module, Tensor]:
    """The network, which returns its loss from now on, by its own names; and a target for it, classes of positions.

    LayerwiseError where its output is not (samples, classes, positions, ...).
    """
    import torch

    kind, of = type(network), LOSSES[loss]

    def forward(self: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        return of(kind.forward(self, x), target)

    with torch.no_grad():
        out = network(*inputs)
    if not isinstance(out, torch.Tensor) or out.dim() < 3:
        raise LayerwiseError(f"model {spec!r}: --loss is for one output (samples, classes, positions), which it lacks")
    network.__class__ = type(f"{kind.__name__}WithLoss", (kind,), {"forward": forward})  # copies of it have that, too
    return network, torch.zeros_like(out[:, 0], dtype=torch.int64)
