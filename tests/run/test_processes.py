"""Laws 6 and 7 on real processes, over gloo: eight ranks, and torchrun's way in."""

import pytest
import torch

from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from tests.comm.pool import run_ranks
from tests.run.plans import check_equal, random_plan, small, train
from tests.traces import by_rank_0


def train_on(comm: Comm, name: str, ranks: int, seed: int):
    """Called in every process."""
    torch.set_num_threads(1)
    with by_rank_0(comm):
        given = small(name)
    return train(given, random_plan(given.graph, ranks, seed, "free"), comm)


# Threads, in test_module, have these networks by default; here it is the processes that are new.
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("lenet5", 4),
        pytest.param("resnet18", 4, marks=pytest.mark.slow),
        pytest.param("lenet5", 8, marks=pytest.mark.slow),
        pytest.param("vgg16", 8, marks=pytest.mark.slow),
        pytest.param("unet3d", 8, marks=pytest.mark.slow),
    ],
)
def test_random_plans_on_processes(name: str, ranks: int) -> None:
    given = small(name)
    plan = random_plan(given.graph, ranks, ranks, "free")
    single = train(given, plan, SoloComm())
    check_equal(run_ranks(ranks, "tests.run.test_processes:train_on", name, ranks, ranks), single, plan)
