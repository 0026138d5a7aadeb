"""Rows of the importer's table that take parameters, and losses: the imported layers compute what the operator does."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.importers.load import network_of
from layerwise.importers.torch.from_torch import from_torch
from layerwise.ops.nn.conv import Conv
from layerwise.ops.nn.norm import BatchNorm, InstanceNorm, LocalResponseNorm
from layerwise.ops.tensor.pointwise import Binary, Unary
from tests.importers.evaluate import imported
from tests.importers.torch.test_ops import X, image
from tests.importers.zoo import Function

LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": lambda x, y: F.cross_entropy(x, y),
    "cross_entropy smoothed": lambda x, y: F.cross_entropy(x[:, :, None], y[:, None], label_smoothing=0.1),
    "cross_entropy each": lambda x, y: F.cross_entropy(x, y, reduction="none"),
    "nll": lambda x, y: F.nll_loss(x.log_softmax(1), y),
}
REGRESSIONS: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, beta=0.3),
    "huber": lambda x, y: F.huber_loss(x, y, delta=0.3),
    "bce_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y / 2),
    "bce": lambda x, y: F.binary_cross_entropy(x / 2, y / 2),
    "kl each": lambda x, y: F.kl_div(x, y, reduction="none"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_classes(name: str) -> None:
    imported(Function(LOSSES[name]), (image(4, 5), torch.tensor([0, 4, 2, 1])))


@pytest.mark.parametrize("name", REGRESSIONS)
def test_loss_of_numbers(name: str) -> None:
    imported(Function(REGRESSIONS[name]), (image(4, 5), image(4, 5).flip(0)))


def test_mean_over_the_batch_is_not_baked_in() -> None:
    """kl_div's "batchmean" is exported as a sum, divided by the batch of the example."""
    graph = from_torch(Function(lambda x, y: F.kl_div(x, y, reduction="batchmean")), (image(4, 5), image(4, 5)))
    (layer,) = graph.inner
    assert layer.op.rows()["reduction"] == "batchmean"


@pytest.mark.parametrize("truth", [True, False])
@pytest.mark.parametrize("fn", [torch.bitwise_and, torch.bitwise_or])
def test_masks_that_are_joined_with_a_truth(fn: Callable[..., Tensor], truth: bool) -> None:
    imported(Function(lambda x: x.masked_fill(fn(x > 0, torch.tensor(truth)), 2.0)), (image(4, 5),))
    imported(Function(lambda x: x.masked_fill(fn(torch.tensor(truth), x > 0), 2.0)), (image(4, 5),))


def test_a_write_of_no_element_is_none() -> None:
    def write(x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 5:9:3] = x[:, 5:9:3]
        return y * 2

    imported(Function(write), (image(4, 5),))


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2), (3, 4, 9)),
    "conv2d": (nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(0, 1), groups=2, bias=False), X),
    "conv3d": (nn.Conv3d(2, 4, 3, padding=1), (3, 2, 4, 5, 6)),
    "conv same": (nn.Conv2d(4, 6, (4, 3), padding="same", dilation=(1, 2)), X),
    "conv valid": (nn.Conv2d(4, 6, 2, padding="valid"), X),
    "conv circular": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), X),
    "conv_transpose1d": (nn.ConvTranspose1d(4, 6, 3, stride=2), (3, 4, 9)),
    "conv_transpose2d": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), X),
    "conv_transpose3d": (nn.ConvTranspose3d(2, 4, 2, bias=False), (3, 2, 4, 5, 6)),
    "linear": (nn.Linear(5, 7), X),
    "linear without bias": (nn.Linear(5, 7, bias=False), (3, 5)),
    "group norm": (nn.GroupNorm(2, 4), X),
    "instance norm": (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), X),
    "instance norm of a momentum": (nn.InstanceNorm2d(4, momentum=0.4, track_running_stats=True), X),
    "layer norm": (nn.LayerNorm((6, 5)), X),
    "layer norm without bias": (nn.LayerNorm(5, bias=False), X),
    "rms norm": (nn.RMSNorm(5), X),
    "prelu": (nn.PReLU(4), X),
    "prelu of one": (nn.PReLU(), X),
    "dropout of nothing": (nn.Sequential(nn.Dropout(0.0), nn.ReLU()), X),
    "upsample": (nn.Upsample(scale_factor=2), X),
    "identity": (nn.Sequential(nn.Identity(), nn.Flatten(), nn.ReLU()), X),
    "unflatten": (nn.Sequential(nn.Flatten(), nn.Linear(120, 12), nn.Unflatten(1, (3, 4)), nn.Tanh()), X),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_module(name: str) -> None:
    module, shape = LAYERS[name]
    graph = imported(module.double(), (image(*shape),))
    assert graph.parameter_count() == sum(p.numel() for p in module.parameters())


def test_batch_norm() -> None:
    imported(nn.BatchNorm2d(4).double(), (image(*X),), times=1)  # with other samples it is another function
    graph = imported(nn.BatchNorm1d(4, affine=False, track_running_stats=False).double(), (image(3, 4, 5),), times=1)
    assert graph["batch_norm"].out.dims == ("n", "c", "l")


def test_momenta() -> None:
    model = nn.Sequential(nn.InstanceNorm2d(4, momentum=0.4, track_running_stats=True), nn.BatchNorm2d(4, momentum=0.3))
    ops = [layer.op for layer in from_torch(model, (image(*X).float(),)).inner]
    assert ops == [InstanceNorm(track=True, momentum=0.4), BatchNorm(momentum=0.3)]


@pytest.mark.parametrize("training", [True, False])
def test_cumulative_averages_are_refused(training: bool) -> None:
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.BatchNorm2d(4, momentum=None))).train(training)
    with pytest.raises(LayerwiseError, match=r"layer '1\.0': batch norm with momentum=None .* set a momentum"):
        from_torch(model, (image(*X).float(),))


def test_local_response_norm_is_one_layer() -> None:
    graph = from_torch(nn.Sequential(nn.Conv2d(4, 6, 1), nn.LocalResponseNorm(5, 1e-3)), (image(*X).float(),))
    assert [(layer.name, layer.op) for layer in graph.inner][1] == ("1", LocalResponseNorm(5, 1e-3))


class Products(nn.Module):
    """Parameters in matrix products, stored either way."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(7))
        self.left = nn.Parameter(torch.randn(2, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x @ self.w + self.b
        z = torch.einsum("nchw,wk->nkhc", x, self.w)
        rows = torch.addmm(self.b, x.reshape(-1, 5), self.w, beta=2.0, alpha=0.5)
        return y, z, rows, self.left @ y, F.linear(y, self.w), torch.relu(F.linear(x.view(-1, 5), self.w.T, self.b))


def test_products_with_parameters() -> None:
    model = Products().double()
    graph = imported(model, (image(*X),))
    assert graph.parameter_count() == sum(p.numel() for p in model.parameters())
    kinds = [layer.op.kind for layer in graph.inner]
    assert kinds.count("linear") == 5, kinds  # only left @ y is none


def test_einsum_leaves_samples_apart() -> None:
    """As XLNet writes its projections: samples are the second of the letters that only the first operand has."""
    heads = nn.Parameter(torch.randn(5, 3, 4, dtype=torch.float64))

    def projected(x: Tensor) -> Tensor:
        made = torch.einsum("ibh,hnd->ibnd", x.transpose(0, 1), heads)
        return torch.einsum("ibnd,hnd->bih", made, heads)

    model = Function(projected)
    model.register_parameter("heads", heads)
    graph = imported(model, (torch.randn(4, 6, 5).double(),))
    assert [layer.out.dims[:2] for layer in graph.inner if layer.op.kind == "matmul"] == [("s", "n"), ("s", "n")]


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bags(mode: str) -> None:
    bag, ids = nn.EmbeddingBag(9, 4, mode=mode).double(), torch.randint(9, (4, 5))
    graph = imported(bag, (ids,))
    assert graph.layers[-2].out.describe() == "(n=4, c=4)"
    assert not any(layer.whole for layer in graph.inner)


def test_an_embedding_bag_with_weights_of_its_rows() -> None:
    bag, ids = nn.EmbeddingBag(9, 4, mode="sum").double(), torch.randint(9, (4, 5))
    imported(bag, (ids,), {"per_sample_weights": torch.randn(4, 5).double()})


@pytest.mark.parametrize("bag", [nn.EmbeddingBag(9, 4, mode="max"), nn.EmbeddingBag(9, 4, padding_idx=3)])
def test_embedding_bags_of_other_rules_are_whole(bag: nn.Module) -> None:
    graph = from_torch(bag, (torch.randint(9, (4, 5)),))
    assert [layer.whole for layer in graph.inner][-1]
    with pytest.raises(LayerwiseError):  # its bags begin where those of the example do
        network_of(bag, (torch.randint(9, (4, 5)),), 8, "test")


def test_parameters_and_buffers_live_in_the_layer() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.randn(4))
            self.register_buffer("mean", torch.randn(1, 4, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return (x - self.mean) * self.gain.view(1, -1, 1, 1)

    graph = imported(Scaled().double(), (image(*X),))
    assert [(layer.op, layer.parameters) for layer in graph.inner] == [
        (Binary("sub", (1, 4, 1, 1), trainable=False), ("mean",)),
        (Binary("mul", (1, 4, 1, 1), stored=(4,)), ("gain",)),
    ]
    assert graph.parameter_count() == 4


def test_scalar_tensors_are_numbers() -> None:
    graph = from_torch(Function(lambda x: x / torch.tensor(8.0) + torch.ones(3).sum()), (image(3, 4),))
    assert [layer.op for layer in graph.inner] == [Unary("div_scalar", (8.0,)), Unary("add_scalar", (3.0,))]


def test_decomposed_programs() -> None:
    """Core ATen, as torch.export.ExportedProgram.run_decompositions makes it."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.GELU())
    exported = torch.export.export(model, (torch.randn(2, 3, 6, 6),)).run_decompositions()
    graph = from_torch(exported)
    assert graph.parameter_count() == sum(p.numel() for p in model.parameters())
    assert isinstance(graph["0"].op, Conv)
    assert graph.layers[-2].out.describe() == "(n=2, c=5)"
