"""The networks have the published sizes, and wrong names are answered with help. (tests/importers exports them.)"""

import re
import subprocess
import sys
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from layerwise import models
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_network

# Parameters, and the output's shape for one sample.
EXPECTED = {
    "alexnet": (61_100_840, (1000,)),
    "alexnet_grouped": (60_965_224, (1000,)),
    "cifar10_cnn": (64 * 76 + 64 * 1601 + 100 * 65 + 10 * 101, (10,)),
    "cosmoflow": (2_131_252, (4,)),
    "densenet121": (7_978_856, (1000,)),
    "inception_v3": (23_834_568, (1000,)),
    "inception_v3_aux": (27_161_264, (1000,)),
    "lenet5": (61_706, (10,)),
    "mlp2": (1025 * 2048 + 2049 * 10, (10,)),
    "mlp3": (1025 * 2048 + 2049 * 1024 + 1025 * 10, (10,)),
    "mnist_cnn": (32 * 26 + 64 * 801 + 200 * 577 + 10 * 201, (10,)),
    "mobilenet_v2": (3_504_872, (1000,)),
    "resnet18": (11_689_512, (1000,)),
    "resnet50": (25_557_032, (1000,)),
    "resnet152": (60_192_808, (1000,)),
    "unet2d": (31_037_698, (2, 256, 256)),
    "unet3d": (19_070_563, (3, 128, 128, 128)),
    "vgg16": (138_357_544, (1000,)),
}
CONVOLUTIONAL = [name for name in EXPECTED if not name.startswith("mlp")]


@cache
def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return models.find(name).build()


def parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def outputs(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def test_every_name_is_expected_here_in_natural_order() -> None:
    def natural(name: str) -> list[int | str]:
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]

    assert models.names() == list(EXPECTED) == sorted(EXPECTED, key=natural)
    assert all(models.find(name).name == name for name in models.names())


@pytest.mark.parametrize("name", EXPECTED)
def test_number_of_parameters_and_shape_of_the_output(name: str) -> None:
    assert parameters(on_meta(name)) == EXPECTED[name][0]
    results = outputs(on_meta(name)(*models.find(name).example_inputs(2)))
    assert len(results) == (2 if name == "inception_v3_aux" else 1)
    assert all(result.shape == (2, *EXPECTED[name][1]) and result.dtype == torch.float32 for result in results)


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_reduced_width_and_other_classes(name: str) -> None:
    model = models.find(name)
    with torch.device("meta"):
        network = model.build(width=0.1, num_classes=7)
    assert parameters(network) < 0.03 * EXPECTED[name][0]
    for result in outputs(network(*model.example_inputs(2))):
        assert result.shape == (2, 7, *EXPECTED[name][1][1:])


@pytest.mark.parametrize("width", [0, -1.0, float("nan"), float("inf")])
def test_width_that_leaves_no_network(width: float) -> None:
    with pytest.raises(LayerwiseError, match="positive"):
        models.find("lenet5").build(width=width)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("alexnet", ["features.0", "classifier.1"]),
        ("vgg16", ["features.28", "classifier.6"]),
        ("resnet50", ["layer1.0.conv1", "layer2.0.downsample.0", "layer4.2.bn3", "fc"]),
        ("densenet121", ["features.conv0", "features.denseblock4.denselayer16.conv2", "features.transition1.pool"]),
        ("mobilenet_v2", ["features.0.0", "features.1.conv.0.0", "features.17.conv.3", "classifier.1"]),
        ("inception_v3_aux", ["Conv2d_1a_3x3.bn", "Mixed_5b.branch1x1.conv", "AuxLogits.conv1.conv", "fc"]),
    ],
)
def test_layers_are_named_as_in_torchvision(name: str, layers: list[str]) -> None:
    assert set(layers) <= dict(on_meta(name).named_modules()).keys()


def test_inception_has_one_output_in_evaluation() -> None:
    with torch.device("meta"):
        network = models.find("inception_v3_aux").build(width=0.1).eval()
    assert network(*models.find("inception_v3_aux").example_inputs(1)).shape == (1, 1000)


def test_alexnet_normalises_as_its_paper_says() -> None:
    x = torch.linspace(-90, 90, 7 * 4, dtype=torch.float64).reshape(1, 7, 2, 2)
    squares = torch.stack([x[:, max(0, i - 2) : i + 3].square().sum(1) for i in range(7)], 1)
    norm = models.find("alexnet_grouped").build(width=0.01).get_submodule("features.2")
    torch.testing.assert_close(norm(x), x / (2 + 1e-4 * squares) ** 0.75)


def test_3d_unet_has_the_published_parameters_for_three_channels() -> None:
    with torch.device("meta"):
        network = models.find("unet3d").build(in_channels=3)
    scales = sum(layer.weight.numel() for layer in network.modules() if isinstance(layer, nn.BatchNorm3d))
    assert parameters(network) - scales == 19_069_955  # Cicek et al. count no scales of batch norm


def test_cosmoflow_has_the_published_shapes_on_a_cube_of_512() -> None:
    sides = []
    with torch.device("meta"):
        network = models.find("cosmoflow:512").build(width=0.1)
    for layer in network.modules():
        if isinstance(layer, nn.Conv3d):
            layer.register_forward_hook(lambda _layer, _inputs, y: sides.append(y.shape[-1]))
    network(*models.find("cosmoflow:512").example_inputs(1))
    assert sides == [510, 253, 62, 29, 13, 5, 1]


@pytest.mark.parametrize("side", [58, 59, 63, 100, 127, 129, 256, 4096])
def test_cosmoflow_of_any_side(side: int) -> None:
    model = models.find(f"cosmoflow:{side}")
    with torch.device("meta"):
        network = model.build()
    assert model.input_shape == (4, side, side, side)
    assert parameters(network) == EXPECTED["cosmoflow"][0]
    assert network(*model.example_inputs(2)).shape == (2, 4)


def widths(name: str) -> list[int]:
    return [int(width) for width in name.removeprefix("mlp:").split("x")]


@pytest.mark.parametrize(("name", "same"), [("mlp2", "mlp:1024x2048x10"), ("mlp3", "mlp:1024x2048x1024x10")])
def test_the_mlps_of_torchad(name: str, same: str) -> None:
    """Tanh between the layers, which any other MLP has ReLU for."""
    ours, other = (models.find(spec).build() for spec in (name, same))
    assert [str(layer) for layer in ours] == [str(layer).replace("ReLU", "Tanh") for layer in other]
    assert [type(layer) for layer in list(ours)[1::2]] == [nn.Tanh] * (len(widths(same)) - 2)


def test_the_cnns_of_torchad() -> None:
    """Its appendix B has the sizes that the images are flattened to."""
    for name, features in (("mnist_cnn", 64 * 3 * 3), ("cifar10_cnn", 64)):
        linear = [layer for layer in models.find(name).build() if isinstance(layer, nn.Linear)]
        assert linear[0].in_features == features


@pytest.mark.parametrize("name", ["mlp:3x4", "mlp:1x1x1", "mlp:5x7x9x11"])
def test_mlp_of_any_widths(name: str) -> None:
    model = models.find(name)
    network = model.build()
    *_, last = network.children()
    linear = [layer for layer in network.children() if isinstance(layer, nn.Linear)]
    assert [linear[0].in_features, *(layer.out_features for layer in linear)] == widths(name)
    assert last is linear[-1]
    assert network(*model.example_inputs(2, device="cpu")).shape == (2, widths(name)[-1])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet34", "nearest: .*resnet"),
        ("VGG-16", "nearest: vgg16"),
        ("qqqq", "unknown model 'qqqq'; there are .*lenet5.*mlp:1024x2048x10"),
        ("net.py", "of your own package.module:callable"),
        ("", "unknown model ''"),
        ("resnet50:3", "takes no parameter"),
        ("mlp", "two or more positive widths"),
        ("mlp:", "two or more positive widths"),
        ("mlp:10", "two or more positive widths"),
        ("mlp:10x", "two or more positive widths"),
        ("mlp:axb", "two or more positive widths"),
        ("mlp:0x3", "two or more positive widths"),
        ("mlp:-1x3", "two or more positive widths"),
        ("mlp:1_0x3", "two or more positive widths"),
        ("mlp:10x100000000", "100000000 is too large"),
        ("mlp:10x" + "9" * 5000, "two or more positive widths"),
        ("mlp:" + "x".join(["1"] * 5000), "5000 widths"),
        ("cosmoflow:", "side of the cube"),
        ("cosmoflow:256x256", "side of the cube"),
        ("cosmoflow:7", "from 58 to 4096"),
        ("cosmoflow:57", "from 58 to 4096"),
        ("cosmoflow:4097", "from 58 to 4096"),
        ("unet3d:", "side of the cube, as in 'unet3d:256'"),
        ("unet3d:12", "a multiple of 8"),
    ],
)
def test_wrong_names_are_answered_with_help(name: str, message: str) -> None:
    with pytest.raises(LayerwiseError, match=message):
        models.find(name)


def test_empty_batch() -> None:
    with pytest.raises(LayerwiseError, match="vgg16: a batch of 0"):
        models.find("vgg16").example_inputs(0)


def test_finding_a_model_does_not_import_torch() -> None:
    code = (
        "import sys; from layerwise import models; models.find('vgg16'); models.find('mlp:3x4'); models.names();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "digest"),
    [("lenet5", "47d0ac84bee06688"), ("mobilenet_v2", "15082098f9d3cafd"), ("unet3d", "8d28a3e927d678d4")],
)
def test_digests_stay(name: str, digest: str) -> None:
    """Plans and measured profiles of version 0.1 name a network and its operators by what they are made of."""
    assert fuse(load_network(name, 4).graph).digest.startswith(digest)
