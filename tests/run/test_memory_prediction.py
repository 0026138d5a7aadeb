"""The memory that a plan is predicted to take against the bytes of storages that are alive in a real step."""

from functools import cache

import pytest
import torch

from benchmarks.memory_prediction import compared

CPU = torch.device("cpu")
CASES = [
    ("lenet5", "serial", "sgd", 1),
    ("lenet5", "serial", "adam", 1),
    pytest.param("resnet18", "serial", "sgd", 1, marks=pytest.mark.slow),
    pytest.param("vgg16", "serial", "momentum", 1, marks=pytest.mark.slow),
    pytest.param("inception-like", "serial", "sgd", 1, marks=pytest.mark.slow),
    ("unet3d", "serial", "sgd", 1),
    ("lenet5", "model", "momentum", 2),
    ("lenet5", "data", "sgd", 2),
    pytest.param("inception-like", "data", "sgd", 2, marks=pytest.mark.slow),
    pytest.param("inception-like", "model", "sgd", 2, marks=pytest.mark.slow),
    ("lenet5", "data, sharded", "adam", 2),
    pytest.param("unet3d", "data, gathered", "adam", 2, marks=pytest.mark.slow),  # lenet5 is the quick one
    pytest.param("vgg16", "data, sharded", "sgd", 2, marks=pytest.mark.slow),
    pytest.param("vgg16", "data, gathered", "sgd", 2, marks=pytest.mark.slow),
    pytest.param("alexnet-like", "data, gathered", "sgd", 2, marks=pytest.mark.slow),
    ("lenet5", "data, gathered", "sgd", 2),
    pytest.param("resnet18", "data, gathered", "momentum", 2, marks=pytest.mark.slow),
    pytest.param("unet3d, one sample", "searched", "sgd", 2, marks=pytest.mark.slow),  # it splits space, as the next
    ("unet3d, one sample", "space", "sgd", 2),  # halos: one copy of what a convolution and the ReLU before it keep
    pytest.param("resnet18", "serial, recompute", "sgd", 1, marks=pytest.mark.slow),
    ("unet3d", "serial, recompute", "sgd", 1),
    pytest.param("inception-like", "serial, recompute", "sgd", 1, marks=pytest.mark.slow),
    ("lenet5", "model, recompute", "momentum", 2),
    ("lenet5", "data, gathered, recompute", "adam", 2),
    pytest.param("inception-like", "model, recompute", "sgd", 2, marks=pytest.mark.slow),
    pytest.param("unet3d, one sample", "model, recompute", "sgd", 2, marks=pytest.mark.slow),
]


@cache
def of_case(name: str, plan: str, optimizer: str, ranks: int) -> tuple[float, float]:
    return compared(name, plan, optimizer, ranks, CPU)


@pytest.mark.parametrize(("name", "plan", "optimizer", "ranks"), CASES)
def test_memory_is_as_predicted(name: str, plan: str, optimizer: str, ranks: int) -> None:
    predicted, measured = of_case(name, plan, optimizer, ranks)
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("name", "least"), [("unet3d", 0.4), pytest.param("resnet18", 0.1, marks=pytest.mark.slow)])
def test_recompute_takes_less(name: str, least: float) -> None:
    predicted, measured = of_case(name, "serial, recompute", "sgd", 1)
    without, real = of_case(name, "serial", "sgd", 1)
    assert predicted < (1 - least) * without
    assert measured < (1 - least) * real


@pytest.mark.parametrize(
    ("name", "plan", "ranks"),
    [
        pytest.param("unet3d", "serial", 1, marks=pytest.mark.slow),  # minutes: convolutions of bf16 on a CPU
        pytest.param("unet3d", "serial, recompute", 1, marks=pytest.mark.slow),
        pytest.param("resnet18", "serial, recompute", 1, marks=pytest.mark.slow),
        pytest.param("inception-like", "model", 2, marks=pytest.mark.slow),
        pytest.param("resnet18", "serial", 1, marks=pytest.mark.slow),
        ("lenet5", "serial, recompute", 1),
        ("lenet5", "model", 2),
    ],
)
def test_memory_in_mixed_precision(name: str, plan: str, ranks: int) -> None:
    predicted, measured = compared(name, plan, "sgd", ranks, CPU, "bf16")
    assert predicted == pytest.approx(measured, rel=0.05)
    assert predicted < 0.9 * of_case(name, plan, "sgd", ranks)[0]
