"""How the tests are run: hypothesis's settings, and in which order files are given to several workers."""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

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

# What somebody has measured here before changes no test.
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


# Files for one worker of several (--dist loadfile). Those with processes share a server and its pools of ranks, which
# take seconds to start; those that train the same networks trace each of them once.
TOGETHER = {
    "ranks of the runtime": """
        loops/test_loops run/test_dtensors run/test_compile run/test_memory_prediction run/test_processes run/test_state
        run/test_in_place test_trace run/test_ahead comm/test_comms comm/test_start comm/test_watch train/test_run_cli
        train/test_run_ranks train/test_signals checkpoint/test_crashes""",
    "ranks of scripts": """
        test_examples api/test_transformers api/test_groups api/test_parallelize api/test_fit api/test_loaders
        api/test_process_state api/test_machine api/test_race api/test_save api/test_split
        comm/test_faults integrations/test_hugging_face integrations/test_lightning
        integrations/test_monai_training integrations/test_nnunet_training inference/test_command cli/test_grids
        benchmarks/test_pipeline measure/test_links_time importers/torch/read/test_arguments""",
    "small networks": """
        run/test_module run/test_recompute run/test_strided run/test_optimised run/test_bytes program/test_order
        oracle/test_strategies""",
}
# The others that take longest: no worker is left alone with one of them at the end.
FIRST = """
    importers/torch/test_from_torch benchmarks/test_cluster_plan search/test_overlap volumes/test_training
    test_package cost/test_model importers/onnx/test_exports
    cli/test_display cli/test_doctor cost/test_transfer importers/onnx/test_operators
    api/test_planner run/test_memory benchmarks/test_gpu cost/test_memory inference/test_predict
    run/test_autocast volumes/test_loader cli/test_commands cli/test_memory train/test_train run/test_states
    search/test_find run/test_inference cost/test_price"""
GROUPS = {f"tests/{name}.py": group for group, names in TOGETHER.items() for name in names.split()}
ORDER = [*TOGETHER, *(f"tests/{name}.py" for name in FIRST.split())]


def group_of(nodeid: str) -> str:
    """The tests that go to one worker: those of a group of files, or of a file."""
    file = nodeid.partition("::")[0]
    return GROUPS.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, by groups of files."""
    from xdist.scheduler import LoadFileScheduling

    class Grouped(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Grouped(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: a worker more than there are cores, as workers wait for time-outs and ranks a fifth of their time."""
    return (os.cpu_count() or 1) + 1


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would begin with the files that have most tests


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # PyTorch and the tests themselves: collections pass over what never goes
    gc.set_threshold(10_000, 10, 10)  # tracing makes many objects, and hardly any in a circle


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        group = group_of(item.nodeid)
        return ORDER.index(group) if group in ORDER else len(ORDER)

    items.sort(key=place)
