"""How the tests are run: hypothesis's settings, and in which order files are given to several workers."""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import settings

from layerwise.importers import load
from layerwise.importers.load import Network

# No deadline (this runs on shared machines); more examples on request: HYPOTHESIS_PROFILE=thorough.
settings.register_profile("default", deadline=None, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# A worker a core has a thread of its own (before PyTorch is imported, which asks once).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a test searches for is searched for, and what somebody has measured here before changes no test.
os.environ["LAYERWISE_NO_CACHE"] = "1"
if "LAYERWISE_CACHE" not in os.environ:  # else it is the one of the process that has started this one
    _kept = tempfile.TemporaryDirectory(prefix="layerwise-tests-")
    os.environ["LAYERWISE_CACHE"] = _kept.name

# Processes that tests start share the bytecode of what they import, also where the environment says to write none.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(autouse=True, scope="session")
def _traced_once() -> Iterator[None]:
    """Built-in networks are traced once a process: they have no values, and tracing is slow."""
    built_in = load._built_in

    @cache
    def traced(spec: str) -> Network:
        network = built_in(spec, None)  # type: ignore[arg-type] # of the samples that it is traced with
        assert all(tensor.is_meta for tensor in network.built.values())  # nothing that a test could change
        return network

    def of_batch(spec: str, batch: int) -> Network:
        network = traced(spec)
        return replace(network, graph=network.graph.rebatch(batch))

    load._built_in = of_batch
    yield
    load._built_in = built_in


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """What Lightning or Accelerate leave of a script in this process, a group and variables, ends with the test."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
    if (dist := sys.modules.get("torch.distributed")) is not None and dist.is_initialized():
        dist.destroy_process_group()
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def models_traced_once() -> Iterator[None]:
    """See tests.traces."""
    from tests.traces import once

    with once():
        yield


# The files that take longest, so that no worker is left alone with one of them at the end (--dist loadfile).
FIRST = (
    "tests/loops/test_loops.py",
    "tests/run/test_dtensors.py",
    "tests/run/test_memory_prediction.py",
    "tests/test_examples.py",
    "tests/run/test_compile.py",
    "tests/api/test_transformers.py",
    "tests/importers/torch/test_from_torch.py",
    "tests/api/test_parallelize.py",
    "tests/inference/test_predict.py",
    "tests/volumes/test_training.py",
    "tests/comm/test_faults.py",
    "tests/run/test_module.py",
    "tests/run/test_recompute.py",
    "tests/checkpoint/test_crashes.py",
    "tests/benchmarks/test_cluster_plan.py",
    "tests/train/test_run_ranks.py",
    "tests/api/test_groups.py",
    "tests/integrations/test_hugging_face.py",
    "tests/search/overlap/test_cuts.py",
    "tests/program/test_order.py",
    "tests/cost/test_transfer.py",
    "tests/run/test_bytes.py",
    "tests/volumes/test_loader.py",
    "tests/api/test_whole.py",
    "tests/run/test_memory.py",
    "tests/run/test_autocast.py",
    "tests/train/test_run_cli.py",
    "tests/test_package.py",
    "tests/cost/test_memory.py",
    "tests/oracle/test_strategies.py",
    "tests/search/test_find.py",
    "tests/cost/test_price.py",
    "tests/cli/test_doctor.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: a worker more than there are cores, as workers wait for time-outs and ranks a fifth of their time."""
    return (os.cpu_count() or 1) + 1


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would begin with the files that have most tests


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # PyTorch and the tests themselves: collections pass over what never goes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        file = item.nodeid.partition("::")[0]
        return FIRST.index(file) if file in FIRST else len(FIRST)

    items.sort(key=place)
