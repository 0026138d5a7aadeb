"""A user teaches layerwise an operator of his own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.errors import LayerwiseError
from layerwise.geometry import identity, whole, window
from layerwise.importers import registry
from layerwise.importers.registry import Built, Call, Operand, canonical, lookup
from layerwise.ops.base import Op
from layerwise.ops.facts import Dim, Maps, Parameter
from layerwise.ops.tensor.pointwise import Unary
from layerwise.tensor import TensorSpec


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_builds", {})


@torch.library.custom_op("layerwise_test::blend", mutates_args=())
def blend(x: Tensor, weight: Tensor, taps: int, scale: float = 1.0) -> Tensor:
    """Every position of the sequence is a weighted sum of itself and the taps - 1 before it, channel by channel."""
    padded = torch.nn.functional.pad(x, (0, 0, taps - 1, 0))
    return scale * sum(padded[:, i : i + x.shape[1]] * weight[i] for i in range(taps))


@blend.register_fake
def _(x: Tensor, weight: Tensor, taps: int, scale: float = 1.0) -> Tensor:
    return torch.empty_like(x)


@dataclass(frozen=True, slots=True)
class Blend(Op):
    """What layerwise needs to know of it: (n, s, c) with a weight (taps, c)."""

    kind: ClassVar[str] = "blend"
    taps: int

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        if len(inputs[0].shape) != 3:
            raise LayerwiseError(f"blend needs an input (n, s, c), not {inputs[0].describe()}")
        return inputs[0]

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        n, s, c = out.shape
        return ((identity(n, 0), window(s, s, 1, first=1 - self.taps), identity(c, 2)),)

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        width = out.shape[2]
        return (Parameter("weight", (self.taps, width), (whole(self.taps), identity(width, 2))),)


def build(call: Call) -> Built:
    assert call.get("scale", 2.0) == call.number("scale") == 0.5
    return Built(Blend(call.integer("taps")), (call.operand("x"),), (call.operand("weight"),))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 6)
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.ops.layerwise_test.blend(self.up(x), self.weight, 3, 0.5))


def test_own_operator_of_torch_library() -> None:
    x = torch.randn(4, 7, 8)
    assert layerwise.from_torch(Mixer(), (x,))["blend"].whole
    layerwise.register_op("layerwise_test::blend", build)
    graph = layerwise.from_torch(Mixer(), (x,))
    layer = graph["blend"]
    assert layer.op == Blend(3)
    assert layer.parameters == ("weight",)
    assert layer.space.dims == (Dim("n", 4), Dim("s", 7), Dim("c", 6))
    assert graph.parameter_count() == sum(p.numel() for p in Mixer().parameters())
    assert graph.rebatch(12)["tanh"].out.shape == (12, 7, 6)


def test_own_row_goes_before_the_table() -> None:
    layerwise.register_op("aten.relu.default", lambda call: Built(Unary("swoosh"), (call.operand("self"),)))
    graph = layerwise.from_torch(nn.ReLU(), (torch.randn(4, 3),))
    assert [layer.op for layer in graph.inner] == [Unary("swoosh")]


def test_a_build_that_fails_names_the_layer() -> None:
    layerwise.register_op("aten::relu", lambda call: Built(Unary("swoosh"), (call.operand("input"),)))
    with pytest.raises(
        LayerwiseError, match=r"layer '0' \(aten::relu\): aten::relu has no argument 'input'; it has self"
    ):
        layerwise.from_torch(nn.Sequential(nn.ReLU()), (torch.randn(4, 3),))


def test_a_build_may_make_several_layers() -> None:
    def twice(call: Call) -> Built:
        return Built(Unary("exp"), (Built(Unary("abs"), (call.operand("self"),)),))

    layerwise.register_op("aten::relu", twice)
    graph = layerwise.from_torch(nn.Sequential(nn.ReLU()), (torch.randn(4, 3),))
    assert [layer.name for layer in graph.inner] == ["0.unary", "0"]


def test_targets() -> None:
    assert canonical("aten.foo.default") == canonical("aten::foo") == "aten::foo"
    assert canonical("aten.add.Tensor") == "aten::add.Tensor"
    assert canonical("com.acme::Swoosh") == "com.acme::Swoosh"
    assert canonical("Gelu") == "ai.onnx::Gelu"
    for wrong in ("", "::x", "x::"):
        with pytest.raises(LayerwiseError, match="is not an operator name"):
            canonical(wrong)
    with pytest.raises(LayerwiseError, match="it must be a function"):
        layerwise.register_op("a::b", Unary("exp"))  # type: ignore[arg-type]


def test_overloads() -> None:
    layerwise.register_op("mylib::op", build)
    assert lookup("mylib::op.Scalar") is build
    assert lookup("mylib.op.default") is build
    assert lookup("mylib::other") is None

    def scalar(call: Call) -> Built:
        return build(call)

    layerwise.register_op("mylib.op.Scalar", scalar)
    assert lookup("mylib::op.Scalar") is scalar
    assert lookup("mylib::op.Tensor") is build


def test_arguments_of_a_call() -> None:
    spec = TensorSpec((2, 3), ("n", "c"))
    x, w = Operand("activation", "x", spec), Operand("parameter", "w", TensorSpec((3,), (None,)))
    call = Call("a::b", "layer", {"x": x, "ws": (w, w), "stride": 2, "pads": (1, 2), "groups": None, "on": True})
    assert call["stride"] == 2
    assert call.get("groups", 1) == call.get("nothing", 1) == 1
    assert call.integers("stride", 2) == (2, 2)
    assert call.integers("pads") == (1, 2)
    assert call.flag("on")
    assert not call.flag("groups")
    assert call.tensors == (x, w, w)
    assert call.operand("x").activation
    for name, said in (("stride", "not a tensor"), ("groups", "not a tensor")):
        with pytest.raises(LayerwiseError, match=said):
            call.operand(name)
    with pytest.raises(LayerwiseError, match="not a number"):
        call.number("x")
