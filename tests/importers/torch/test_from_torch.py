"""PyTorch models become the layers that compute what they compute."""

import dataclasses
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from layerwise import models
from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.graph.types import TRACED, Region
from layerwise.importers.built_in import SAMPLES, written_graph
from layerwise.importers.load import load_network
from layerwise.importers.torch.from_torch import from_torch
from layerwise.ops.base import Role
from layerwise.ops.ends import Constant, Tied
from layerwise.ops.nn.linear import Embedding, Learned
from layerwise.ops.nn.norm import BatchNorm
from layerwise.ops.tensor.pointwise import Binary, Dropout, Unary
from tests.comm.thread import run_threads
from tests.importers import zoo
from tests.importers.evaluate import imported
from tests.importers.zoo import Function


def ids(*shape: int) -> Tensor:
    torch.manual_seed(len(shape))
    return torch.randint(0, 30, shape)


def numbers(*shape: int) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64)


def names(graph: LayerGraph) -> list[str]:
    return [layer.name for layer in graph.inner if layer.op.kind != "tied"]


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "bert": (zoo.Bert, (ids(4, 7), torch.ones(4, 7, dtype=torch.long))),
    "gpt": (zoo.Gpt, (ids(4, 7),)),
    "vit": (zoo.Vit, (numbers(4, 3, 16, 16),)),
    "swin": (zoo.Swin, (numbers(3, 4, 4, 8),)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (numbers(3, 5, 8),)),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), (numbers(3, 5, 8),) * 2),
    "self-attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (numbers(3, 5, 8),) * 3),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        (numbers(3, 5, 8), numbers(3, 4, 8), numbers(3, 4, 8)),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str) -> None:
    build, inputs = NETWORKS[name]
    model = build().double()
    graph = imported(model, inputs, times=3)
    assert graph.parameter_count() == sum(p.numel() for p in model.parameters())
    labelled = [layer for layer in graph.inner if layer.op.kind in ("linear", "attention", "conv")]
    assert all(layer.out.index("n") is not None for layer in labelled), "samples are split everywhere"


# resnet50 with more of the same blocks; networks of which another has all layers, at another size or with a head more
ALIKE = ("densenet121", "resnet152", "inception_v3", "mlp2", "cosmoflow:394")
OF_ANY_SIZE = ("mlp:8x6x4", "unet3d:16", "cosmoflow:58", "cosmoflow:394")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in ALIKE else n for n in (*models.names(), *OF_ANY_SIZE)]
)
def test_built_in_models(name: str) -> None:
    network = load_network(name, SAMPLES)
    graph, module = network.graph, network.module
    assert module is not None
    assert graph.parameter_count() == sum(p.numel() for p in module.parameters())
    modules = dict(module.named_modules())
    assert all(layer.name in modules for layer in graph.inner if layer.op.kind in ("conv", "linear", "batch_norm"))
    assert graph.rebatch(96).layers[-1].specs[0].shape[0] == 96
    written = written_graph(name)
    assert written is not None
    as_written = written == graph and written.digest == graph.digest
    assert as_written, "models/graphs is not of these models: python -m layerwise.importers writes it again"


def test_convolutional_network_and_its_names() -> None:
    """Layers are named by modules; a module that runs twice has its parameters in nodes of their own."""
    graph = imported(zoo.ConvNet().double(), (numbers(4, 3, 16, 16),), times=1)
    assert names(graph)[:9] == [
        "stem.0",
        "stem.1",
        "stem.2",
        "layers.0.conv1.pad",
        "layers.0.conv1",
        "layers.0.bn1",
        "layers.0.relu",
        "layers.0.conv2",
        "layers.0.add",
    ]
    assert names(graph)[9] == "layers.0.relu:2"  # not the module, but F.relu_ beside it
    assert names(graph)[-3:] == ["pool", "flatten", "fc"]
    assert graph["again.conv1"].parameters == graph["layers.0.conv1"].parameters
    tied = [layer.name for layer in graph.layers if layer.role is Role.TIED]
    assert tied == [f"layers.0.{p}" for p in ("conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias", "conv2.weight")]
    assert graph["layers.0.bn1"].parameters[2:] == ("layers.0.bn1.running_mean", "layers.0.bn1.running_var")


def test_a_parameter_keeps_its_name_where_an_operator_has_the_same() -> None:
    """Else it would have another one in the parallel model, and in its state dict."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t, self.mean = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x.t().t().mean(1, keepdim=True) * self.t.exp() * self.mean.exp()

    graph = imported(Scaled().double(), (numbers(4, 3),))
    assert {layer.name for layer in graph.layers if layer.role is Role.TIED} == {"t", "mean"}


def test_strict_export_gives_the_same_layers() -> None:
    x = torch.randn(4, 3, 16, 16)
    graph = from_torch(torch.export.export(zoo.ConvNet(), (x,), strict=True))
    wanted = from_torch(zoo.ConvNet(), x)
    assert [(layer.name, layer.op) for layer in graph.layers] == [(layer.name, layer.op) for layer in wanted.layers]


def test_hugging_face_bert() -> None:
    graph = from_torch(zoo.Bert(), (ids(4, 7),), kwargs={"attention_mask": torch.ones(4, 7, dtype=torch.long)})
    assert [layer.out.dims for layer in graph.layers[:2]] == [("n", "s"), ("n", "s")]
    assert graph.layers[-1].inputs == ("blocks.1.norm2", "tanh")  # a dict of two outputs
    assert graph["types"].specs[0].dims == ("n", "s")  # zeros of the batch's size
    assert graph["places"].specs[0].dims == (None, "s")
    assert isinstance(graph[graph["places"].inputs[0]].op, Constant)
    assert "attention_mask" not in [layer.name for layer in from_torch(zoo.Bert(), (ids(4, 7),)).layers]


def test_gpt_ties_its_head_and_computes_its_loss() -> None:
    model = zoo.Gpt().double()
    graph = imported(model, (ids(4, 7),), {"labels": ids(4, 7)})
    assert isinstance(graph["wte.weight"].op, Tied)
    assert isinstance(graph["wte"].op, Embedding)
    assert graph["lm_head"].inputs[1] == graph["wte"].inputs[1] == "wte.weight"
    assert graph.parameter_count() == sum(p.numel() for p in model.parameters())
    # The linear layers of GPT-2 merge (n, s), which is undone: both can be split.
    assert graph["h.0.c_attn"].out.dims == ("n", "s", "c")
    assert graph["h.0.c_attn"].op.rows()["transposed"]
    assert graph["cross_entropy_loss"].out.describe() == "(n=28)"


def test_class_token_follows_the_batch() -> None:
    for batch in (1, 4):
        graph = from_torch(zoo.Vit(), (torch.randn(batch, 3, 16, 16),))
        assert isinstance(graph["expand"].op, Learned)
        assert graph["expand"].parameters == ("cls_token",)
        assert graph.rebatch(6)["cat"].out.shape == (6, 17, 12)


def test_meta_device_needs_no_memory_and_little_time() -> None:
    with torch.device("meta"):
        network = models.find("vgg16").build()
    start = time.perf_counter()
    graph = from_torch(network, (torch.empty(8192, 3, 224, 224, device="meta"),))
    assert time.perf_counter() - start < 20
    assert graph.batch == 8192
    assert graph["features.0"].out.volume == 8192 * 64 * 224 * 224
    assert graph.digest == from_torch(network, (torch.empty(2, 3, 224, 224, device="meta"),)).rebatch(8192).digest


def test_meta_and_cpu_are_the_same_graph() -> None:
    for build in (zoo.ConvNet, zoo.Vit):
        with torch.device("meta"):
            shadow = build()
        real = from_torch(build(), (torch.randn(4, 3, 16, 16),))
        assert real.digest == from_torch(shadow, (torch.empty(4, 3, 16, 16, device="meta"),)).digest


def test_the_model_stays_as_it_was() -> None:
    model = zoo.ConvNet().eval()
    model.layers[0].conv1.train()  # computes the same in both modes
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    attributes = [sorted(vars(m)) for m in model.modules()]
    from_torch(model, (torch.randn(4, 3, 16, 16),))
    assert modes == [m.training for m in model.modules()]
    assert attributes == [sorted(vars(m)) for m in model.modules()]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_plans_are_for_training() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3), nn.Dropout2d(0.2)).eval()
    graph = from_torch(model, (torch.randn(2, 3, 8, 8),))
    assert graph["1"].op == BatchNorm()
    assert [graph["2"].op, graph["3"].op] == [Dropout(0.3), Dropout(0.2, channels=True)]


def test_fx_graphs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4)))
    traced = fx.symbolic_trace(model)
    x = torch.randn(2, 3, 8, 8)
    graph = from_torch(traced, x)
    assert names(graph) == ["0", "1.0", "1.1"]
    with pytest.raises(LayerwiseError, match="pass example inputs"):
        from_torch(traced)


def test_exported_program_and_open_batch() -> None:
    model, x = zoo.Vit(), torch.randn(4, 3, 16, 16)
    assert from_torch(torch.export.export(model, (x,))).digest == from_torch(model, (x,)).digest
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    assert from_torch(program).batch == 4
    assert from_torch(program, (torch.randn(16, 3, 16, 16),)).batch == 16
    assert from_torch(program).digest == from_torch(model, (x,)).digest


def test_sizes_that_are_left_open() -> None:
    height = torch.export.Dim("height", min=4)
    program = torch.export.export(nn.Conv2d(3, 3, 3), (torch.randn(4, 3, 8, 8),), dynamic_shapes=({2: height},))
    with pytest.raises(
        LayerwiseError, match=r"input 'input': dimension 2 is left open .* export the model with a fixed"
    ):
        from_torch(program)


LABELS: dict[str, tuple[nn.Module, Tensor, tuple[str | None, ...]]] = {
    "signal": (nn.Conv1d(4, 4, 3), torch.randn(2, 4, 8), ("n", "c", "l")),
    "signal, padded": (nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"), torch.randn(2, 4, 8), ("n", "c", "l")),
    "sequence": (nn.Linear(8, 4), torch.randn(2, 4, 8), ("n", "s", "c")),
    "image": (nn.Conv2d(4, 4, 3), torch.randn(2, 4, 8, 8), ("n", "c", "h", "w")),
    "volume": (nn.Conv3d(4, 4, 3), torch.randn(2, 4, 8, 8, 8), ("n", "c", "d", "h", "w")),
    "features": (nn.Linear(8, 4), torch.randn(2, 8), ("n", "c")),
    "words": (nn.Embedding(8, 4), torch.zeros(2, 8, dtype=torch.int32), ("n", "s")),
    "numbers": (nn.ReLU(), torch.randn(2), ("n",)),
    "much": (nn.ReLU(), torch.randn(2, 2, 2, 2, 2, 2), ("n", None, None, None, None, None)),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_of_inputs(name: str) -> None:
    model, x, dims = LABELS[name]
    assert from_torch(model, (x,)).layers[0].out.dims == dims


@dataclasses.dataclass
class Outputs:
    first: Tensor
    second: Tensor | None = None


torch.export.register_dataclass(Outputs, serialized_type_name="tests.Outputs")


def test_inputs_and_outputs_of_many_kinds() -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    assert from_torch(Function(lambda a: Outputs(a + 1, a.sum(1))), (x,)).layers[-1].inputs == ("add", "sum")
    assert from_torch(Function(lambda a: {"a": [a + 1, None]}), (x,)).layers[-1].inputs == ("add",)
    assert from_torch(Function(lambda a: (b := a + 1, a, b)), (x,)).layers[-1].inputs == ("add", "inputs_0")
    assert names(from_torch(Function(lambda a: a[0] + a[1]["k"]), ([x, {"k": y}],))) == ["add"]  # type: ignore[index]
    assert names(from_torch(Function(lambda a, k: a * k), (x, 2.5))) == ["mul"]
    table = torch.randn(7, 3)  # fed beside the samples
    graph = from_torch(Function(lambda a, t: a @ t.T), (x, table))
    assert graph.layers[1].out.dims == (None, "c")
    assert graph.rebatch(8)["matmul"].out.shape == (8, 7)


def in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    z = y
    y += x
    F.relu_(y)
    y.mul_(3)
    return y + z, y.view(len(y), -1).tanh_()


def test_writing_in_place() -> None:
    imported(Function(in_place), (numbers(2, 3, 4),))
    imported(
        Function(lambda x: (y := x * 2, y[:, 0].zero_())[0]), (numbers(2, 3, 4),)
    )  # as Swin's second version has it
    seen: dict[str, Callable[[Tensor], object]] = {
        "a view is written": lambda x: (y := x * 2, y.view(x.shape[0], -1).relu_())[0],
        "a view is read": lambda x: (y := x * 2, v := y[:, 0], y.relu_(), v)[-1] + 1,
        "a part is changed": lambda x: (y := x * 2, y[:, 0].add_(1))[0],
    }
    for function in seen.values():
        imported(Function(function), (numbers(2, 3, 4),))


def test_constants_are_computed() -> None:
    def masked(x: Tensor) -> Tensor:
        mask = torch.zeros(4, 4, dtype=x.dtype)
        mask[1:] = 1
        mask[:, :2] = float("-inf")
        chosen = torch.zeros(3, dtype=torch.long)
        chosen[1], chosen[2] = 2, 3
        return (x[:, chosen] + mask.triu(1)).softmax(-1) * torch.arange(4)

    graph = imported(Function(masked), (numbers(2, 4, 4, 4),))
    assert [layer.op for layer in graph.inner if isinstance(layer.op, Binary)] == [
        Binary("add", (4, 4), trainable=False),
        Binary("mul", (4,), trainable=False),
    ]


def test_a_mask_a_sample_follows_the_batch() -> None:
    """Stochastic depth draws one number a sample."""
    draw = Function(lambda x: x * x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.8))
    graph = from_torch(draw, (torch.randn(4, 3, 8, 8),))
    (mask,) = [layer for layer in graph.layers if layer.main.draws]
    assert mask.out.describe() == "(n=4, 1, 1, 1)"
    assert graph.rebatch(10)[mask.name].out.shape == (10, 1, 1, 1)
    assert graph.rebatch(10)["mul"].out.shape == (10, 3, 8, 8)


class Regions(nn.Module):
    """no_grad, which stops gradients; autocast and checkpointing, which compute nothing by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x * 2).amax(1, keepdim=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            y = self.fc(x)
            with torch.autocast("cpu", torch.bfloat16), torch.autocast("cuda", enabled=False):
                y = self.fc(y)
        return torch.utils.checkpoint.checkpoint(self.fc, y / scale, use_reentrant=False)


def test_regions_are_inlined() -> None:
    graph = imported(Regions().double(), (numbers(2, 8),))
    assert names(graph) == ["mul", "amax", "detach", "fc", "fc:2", "div", "fc:3"]
    found = [graph[name].autocast for name in ("amax", "fc", "fc:2", "fc:3")]
    assert found == [(), (Region(TRACED, None),), (Region(TRACED, "bfloat16"), Region("cuda", None)), ()]
    assert {layer.out.dtype for layer in graph.layers[1:-1]} == {"float64"}  # which autocast does not cast


def test_a_module_may_be_called_outputs() -> None:
    """The name of the sink."""
    model = nn.Sequential()
    model.add_module("outputs", nn.Linear(3, 2))
    model.add_module("tanh", nn.Tanh())
    graph = from_torch(model, (torch.randn(4, 3),))
    assert names(graph) == ["outputs:2", "tanh"]
    assert graph["tanh"].op == Unary("tanh")


def test_threads_may_import_at_once() -> None:
    """torch.export is not made for threads: they take turns."""
    graphs = run_threads(4, lambda comm: from_torch(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.randn(2, 8)))
    assert {g.digest for g in graphs} == {graphs[0].digest}
