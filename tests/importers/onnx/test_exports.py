"""Networks as PyTorch exports them, and those of ONNX's own zoo."""

import contextlib
import io
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import cycle, product
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from layerwise import models
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.onnx.from_onnx import from_onnx
from layerwise.importers.torch.from_torch import from_torch
from layerwise.ops.base import Role
from layerwise.ops.ends import Tied
from tests.importers.onnx.compute import compute, weights_of

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"

# Parameters as published; the grouped AlexNet of Caffe; batch norm and scale are two layers there.
ZOO = {
    "bvlc_alexnet": 60_965_224,
    "densenet121": 7_978_856 + 2 * 41_824,
    "inception_v1": 6_998_552,
    "inception_v2": 11_214_888,
    "resnet50": 25_557_032,
    "shufflenet": 1_393_320,
    "squeezenet": 1_235_496,
    "vgg19": 143_667_240,
    "zfnet512": 87_250_536,
}


def shapes(graph: LayerGraph) -> list[object]:
    return [(la.name, la.op.kind, la.inputs, la.parameters, la.out.dims, la.out.shape) for la in graph.layers]


SLOW = ("densenet121",)  # the Inceptions have its operators


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in ZOO])
def test_zoo(name: str) -> None:
    """Opset 9, batch 1 baked into reshapes, weights from ConstantOfShape and Unsqueeze."""
    path = LIGHT / f"light_{name}.onnx"
    if not path.exists():
        pytest.skip("this onnx has no light models")
    one, many = from_onnx(path), from_onnx(path, batch=32)
    assert one.batch == 1
    assert many.parameter_count() == ZOO[name]
    for layer, first in zip(many.layers[:-1], one.layers[:-1], strict=True):
        assert layer.out.dims[0] == "n"
        assert (32, *layer.out.shape[1:]) == layer.out.shape
        assert layer.out.shape[1:] == first.out.shape[1:]
        assert layer.out.dims == first.out.dims
    assert many.layers[-1].specs[0].shape[:2] == (32, 1000)
    assert len(fuse(many).layers) < len(many.layers)


# ---- PyTorch's exporter


def export(net: nn.Module, inputs: tuple[Tensor, ...], path: Path, **options: object) -> Path:
    """By the exporter that needs nothing but onnx. It prints what it cannot do, from C++."""
    names = [f"x{i}" for i in range(len(inputs))]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(net, inputs, path, dynamo=False, input_names=names, **options)  # type: ignore[arg-type]
    return path


TRAINING = {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
WAYS: dict[str, dict[str, object]] = {
    "fixed": {},
    "three": {},
    "open": {"dynamic_axes": {"x0": {0: "N"}}},
    "unfolded": {"do_constant_folding": False},
}


@pytest.mark.parametrize("name", ["lenet5", "resnet18", "cosmoflow:64", "mlp:16x32x8"])
def test_built_in_networks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exported for training they are what the PyTorch importer makes of them: same layers, same parameters."""
    monkeypatch.setattr(torch, "_check", lambda *_, **__: None)  # the exporter cannot trace it
    model = models.find(name)
    net = model.build()
    inputs = tuple(torch.randn(x.shape) for x in model.example_inputs(1))
    graph = from_onnx(export(net, inputs, tmp_path / "m.onnx", **TRAINING), batch=4)
    reference = from_torch(net, tuple(torch.randn(2, *x.shape[1:]) for x in inputs)).rebatch(4)

    def rows(of: LayerGraph) -> Counter[object]:
        return Counter((la.op.kind, la.out.shape, la.out.dims, la.parameters) for la in of.layers[1:-1])

    assert rows(graph) == rows(reference)
    assert graph.parameter_count() == sum(p.numel() for p in net.parameters())


class Inception(nn.Module):
    """Branches of other kernels, joined; batch norm, LRN, ceil mode, padding counted and not."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(3, 4, (1, 3), padding=(0, 1)), nn.Conv2d(4, 6, (3, 1), padding=(1, 0)))
        self.lrn, self.fc = nn.LocalResponseNorm(3), nn.Linear(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
        x = self.lrn(torch.cat([self.a(x), self.b(x), pooled], 1))
        x = F.max_pool2d(x, 3, 2, ceil_mode=True) + F.avg_pool2d(x, 3, 2, ceil_mode=True)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Decoder(nn.Module):
    """Group, instance and weight norm, PReLU, transposed convolution, interpolation, pixel shuffle, reflection."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.t = nn.ConvTranspose2d(8, 8, 3, 2, padding=1, output_padding=1)
        self.group, self.instance, self.prelu = nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True), nn.PReLU(8)
        self.w = nn.utils.weight_norm(nn.Conv2d(8, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.prelu(self.group(self.a(x)))
        z = F.interpolate(F.max_pool2d(y, 2), scale_factor=2.0, mode="bilinear")
        z = z + F.interpolate(F.avg_pool2d(y, 2), size=z.shape[-2:], mode="nearest")
        z = F.pixel_shuffle(self.t(self.instance(self.w(z))), 2)
        a, b = F.pad(z, (1, 2, 3, 1), mode="reflect").chunk(2, 1)
        return (a * b.sigmoid()).clamp(-1, 1).mean((2, 3))


class Shuffle(nn.Module):
    """Channel split and shuffle, as in ShuffleNet."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Hardswish())

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        x = torch.cat([a, self.branch(b)], 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class Vision(nn.Module):
    """A vision transformer: class token, positions, PyTorch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 17, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


class Language(nn.Module):
    """A causal language model with tied embeddings, as nanoGPT writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(32, 16)
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("mask", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, ids: Tensor) -> Tensor:
        n, s = ids.shape
        x = self.words(ids) + self.places(torch.arange(s))
        q, k, v = (t.view(n, s, 2, 8).transpose(1, 2) for t in self.qkv(self.norm(x)).split(16, 2))
        a = (q @ k.transpose(-2, -1)) / 8**0.5
        a = a.masked_fill(self.mask[:, :, :s, :s] == 0, float("-inf")).softmax(-1)
        x = x + self.out((a @ v).transpose(1, 2).contiguous().view(n, s, 16))
        return self.head(F.gelu(x))


class Windows(nn.Module):
    """Shifted windows with relative positions, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.qkv = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 24)
        self.norm, self.head, self.table = nn.LayerNorm(8), nn.Linear(8, 5), nn.Parameter(torch.randn(49, 2))
        grid = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        offset = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0) + 3
        self.register_buffer("index", offset[..., 0] * 7 + offset[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        y = torch.roll(self.norm(x), (-2, -2), (1, 2))
        y = y.view(n, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
        q, k, v = self.qkv(y).reshape(-1, 16, 3, 2, 4).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(16, 16, 2).permute(2, 0, 1).unsqueeze(0)
        y = ((q @ k.transpose(-2, -1) / 2 + bias).softmax(-1) @ v).transpose(1, 2).reshape(-1, 16, c)
        y = y.view(n, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        return self.head((x + torch.roll(y, (2, 2), (1, 2))).mean((1, 2)))


class Speech(nn.Module):
    """Recurrent layers in one and both directions, from their sequences and their last states."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True)
        self.gru, self.rnn = nn.GRU(10, 7, batch_first=True), nn.RNN(7, 4, nonlinearity="relu", batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.gru(self.lstm(x)[0])
        _, last = self.rnn(x)
        return torch.cat([last[0], x[:, -1]], 1)


def image() -> Tensor:
    return torch.randn(1, 3, 16, 16)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "inception": (Inception, image),
    "decoder": (Decoder, image),
    "shuffle": (Shuffle, lambda: torch.randn(1, 8, 6, 6)),
    "vision": (Vision, image),
    "language": (Language, lambda: torch.randint(0, 50, (1, 12))),
    "windows": (Windows, lambda: torch.randn(1, 3, 32, 32)),
    "speech": (Speech, lambda: torch.randn(1, 5, 6)),
}


@pytest.mark.parametrize(
    ("name", "way"), [*product(NETWORKS, ["three"]), *zip(NETWORKS, cycle(["fixed", "open", "unfolded"]))]
)
def test_networks(name: str, way: str, tmp_path: Path) -> None:
    """They compute what PyTorch computes, at every batch, however they were exported."""
    torch.manual_seed(0)
    build, example = NETWORKS[name]
    net, x = build(), example()
    for p in net.parameters():
        p.data += 0.1 * torch.randn_like(p)  # so that nothing is equal by initialisation
    net.eval()
    path = export(net, (x.repeat(3 if way == "three" else 1, *(1 for _ in x.shape[1:])),), tmp_path / "m.onnx",
                  opset_version=17, **WAYS[way])  # fmt: skip
    weights = weights_of(path)
    for batch in (1, 3):
        graph = from_onnx(path, batch=batch)
        check(graph, weights, net, torch.cat([example() for _ in range(batch)]))
        assert graph.layers[-1].specs[0].dims[0] == "n"
    many = from_onnx(path, batch=12)
    assert shapes(graph.rebatch(12)) == shapes(many)
    fuse(many)


def check(graph: LayerGraph, weights: Mapping[str, NDArray[np.generic]], net: nn.Module, x: Tensor) -> None:
    """It computes what the network does."""
    (got,) = compute(graph, [x.numpy()], weights)
    with torch.no_grad():
        np.testing.assert_allclose(got, net(x).numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("opset", [9, 10, 11, 12, 13, 14, 16, 18, 20])
def test_opsets_of_the_exporter(opset: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    build, example = NETWORKS["windows"]
    net, x = build().eval(), example()
    path = export(net, (x,), tmp_path / "m.onnx", opset_version=opset)
    check(from_onnx(path), weights_of(path), net, x)


def test_training_exports_keep_ties_and_norms(tmp_path: Path) -> None:
    graph = from_onnx(
        export(Language(), (torch.zeros(1, 12, dtype=torch.long),), tmp_path / "m.onnx", **TRAINING), batch=2
    )
    assert isinstance(graph["words.weight"].op, Tied)
    used = sum(p.numel() for p in Language().parameters()) - 20 * 16  # positions beyond the 12 that are used
    assert graph.parameter_count() == used
    net = Vision()
    graph = from_onnx(export(net, (image(),), tmp_path / "v.onnx", **TRAINING), batch=2)
    assert graph.parameter_count() == sum(p.numel() for p in net.parameters())
    assert all("n" in la.out.dims for la in graph.layers if la.op.kind == "linear")
    parameters = {name for la in graph.layers for name in (*la.parameters, la.name)}
    assert {name for name, _ in net.named_parameters()} <= parameters


def test_equal_initial_values_are_told_apart(tmp_path: Path) -> None:
    """nn.TransformerEncoder copies its layers, and the exporter writes equal tensors once."""
    net = Vision().eval()
    graph = from_onnx(export(net, (image(),), tmp_path / "v.onnx"), batch=2)
    assert graph.parameter_count() == sum(p.numel() for p in net.parameters())
    assert not [la.name for la in graph.layers if la.role is Role.TIED and la.name != "token"]


def test_external_data_of_the_exporter(tmp_path: Path) -> None:
    net = Inception().eval()
    path = export(net, (image(),), tmp_path / "m.onnx")
    model = onnx.load(path)
    onnx.save(model, tmp_path / "e.onnx", save_as_external_data=True, size_threshold=0, location="e.bin")
    assert (tmp_path / "e.bin").stat().st_size > 0
    assert shapes(from_onnx(tmp_path / "e.onnx", batch=2)) == shapes(from_onnx(path, batch=2))
    check(from_onnx(tmp_path / "e.onnx"), weights_of(tmp_path / "e.onnx"), net, image())
