"""Parameters of a split plan are DTensors: PyTorch's own functions give one device's numbers on 2 and 4 ranks."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from layerwise.run.state.plan_dtensor import DISPATCHES
from tests.comm.pool import run_ranks
from tests.run import dtensor_ranks
from tests.run.dtensor_ranks import GATHERED, OPTIMIZERS, PLANS, SHARDED, original, steps
from tests.run.plans import difference

HERE, STATES = "tests.run.dtensor_ranks:", "tests.run.dtensor_states:"
SEVERAL = ("mixed", "states", "fewer")  # quick; the others differ in nothing that matters to most tests


def single(optimizer: str, action: str, last: int = 4) -> tuple[list[float | None], dict[str, Tensor]]:
    model = copy.deepcopy(original())
    return steps(model, OPTIMIZERS[optimizer](model.parameters()), action, last=last), model.state_dict()


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], bound: float = 1e-12) -> None:
    assert found.keys() == wanted.keys()
    assert max(difference(found[name], wanted[name]) for name in wanted) <= bound


def check(results: Iterable[Any], wanted: tuple[list[float | None], dict[str, Tensor]]) -> None:
    for seen, state in results:
        for here, there in zip(seen, wanted[0], strict=True):
            assert here is there or here == pytest.approx(there, rel=1e-12)
        close(state, wanted[1])


ALL = [("sgd", action) for action in ("clip", "clip_as_old_tutorials", "largest", "masked")]  # more: tests/loops
ALL += [(optimizer, "clip") for optimizer in ("sgd_loop", "adamw", "adamw_fused", "adam", "rprop")]
# Every action on one plan, every optimizer on another, clipping on every plan; slowly, all.
QUICK = {
    "mixed": ALL[:4],
    "states": [ALL[0], *ALL[4:]],
    "fewer": [ALL[0], ("adamw", "clip"), ("adamw_fused", "value"), ("sgd", "clip_by_hand")],
}


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        *((name, QUICK.get(name, ALL[:1])) for name in PLANS),
        *(pytest.param(name, ALL, marks=pytest.mark.slow) for name in PLANS),
    ],
)
def test_optimizers_and_norms_are_one_devices(name: str, cases: list[tuple[str, str]]) -> None:
    ranks, cuts = PLANS[name]
    trained = run_ranks(ranks, f"{HERE}trained", cuts, cases)
    for case, of_ranks in zip(cases, zip(*trained, strict=True), strict=True):
        check(of_ranks, single(*case))


def test_what_a_loop_does_with_split_parameters_by_hand() -> None:
    ranks, cuts = PLANS["filters"]
    run_ranks(ranks, f"{HERE}by_hand", cuts)


UNEVEN: dtensor_ranks.Cuts = [{"k": 2}, {"c": 2}, {"c": 2}, {}]  # three input channels, and a layer on one rank


def test_functions_of_parameters_are_one_devices() -> None:
    """Also those that DTensor has no rule for, or a wrong one."""
    assert run_ranks(2, "tests.run.dtensor_functions:other", UNEVEN) == [[], []]
    assert run_ranks(2, "tests.run.dtensor_functions:written", UNEVEN) == [[], []]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in SEVERAL)) for name in PLANS]
)
def test_gradscaler_skips_a_step_on_all_ranks(name: str) -> None:
    ranks, cuts = PLANS[name]
    wanted = dtensor_ranks.scaled(None, [], 0)
    assert wanted[0] == [1024.0, 512.0, 512.0, 512.0]
    for bad in (0, {"fewer": 2, "states": 1}.get(name, ranks - 1)):  # which have some of it
        check(run_ranks(ranks, f"{HERE}scaled", cuts, bad), wanted)


@pytest.mark.parametrize("name", ["filters"])
def test_float16_with_gradscaler(name: str) -> None:
    ranks, cuts = PLANS[name]
    scales, wanted = dtensor_ranks.half(None, [])
    assert set(scales) == {2.0**10}  # the first step is left out
    for found, state in run_ranks(ranks, f"{HERE}half", cuts):
        assert found == scales
        close(state, wanted, 0.03)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("states", "squares"),
        ("fewer", "squares"),
        *(("mixed", how) for how in dtensor_ranks.LOSSES),
    ],
)
def test_a_weight_penalty_is_one_devices(name: str, how: str) -> None:
    """Beside a loss that is this rank's own, which has a graph of its own."""
    ranks, cuts = PLANS[name]
    losses, wanted = dtensor_ranks.penalised(None, [], how)
    found = run_ranks(ranks, f"{HERE}penalised", cuts, how)
    for _, state in found:
        close(state, wanted)
    assert [sum(each) / ranks for each in zip(*(one for one, _ in found), strict=True)] == pytest.approx(losses)


def test_numbers_beside_a_tensor_of_ones_own() -> None:
    wanted = dtensor_ranks.own_counts(None, [])
    for cuts in (PLANS["filters"][1], [{"c": 2}, {"n": 2}, {"c": 2}, {}]):
        for state in run_ranks(2, f"{HERE}own_counts", cuts):
            close(state, wanted)
        run_ranks(2, f"{HERE}beside", cuts)


def test_a_learnt_scale_of_one_rank_is_one_devices() -> None:
    wanted = dtensor_ranks.scale_on_one_rank(None)
    for state in run_ranks(2, f"{HERE}scale_on_one_rank"):
        close(state, wanted)


def test_optimizers_gather_nothing_and_clipping_sends_one_number_a_parameter_at_once() -> None:
    for counts in run_ranks(2, f"{HERE}messages", PLANS["filters"][1]):
        assert isinstance(counts, dict)
        assert counts.pop("a gather") > 0
        assert counts == {"adamw": 0, "loop": 0, "fused": 0, "clipping": 1}


@pytest.mark.parametrize("name", ["mixed", "states"])
def test_to_and_freezing(name: str) -> None:
    ranks, cuts = PLANS[name]
    run_ranks(ranks, f"{HERE}moved", cuts)


def test_what_all_ranks_have_is_written_from_what_some_have() -> None:
    cuts: dtensor_ranks.Cuts = [{"c": 2}, {"n": 2}, {"c": 2}, {}]
    wanted = dtensor_ranks.written(None, cuts)
    for held in run_ranks(2, f"{HERE}written", cuts):
        torch.testing.assert_close(held, wanted)


def test_parameters_that_are_not_cut_evenly_are_dtensors() -> None:
    """On 3 ranks 3, 3 and 2 of 8 channels, 6, 6 and 4 of 16."""
    cut: dtensor_ranks.Cuts = [{"c": 3}, {"n": 3}, {"c": 3}, {"n": 3}]
    kept = [one | states for one in ({"n": 3}, {"h": 3}) for states in (SHARDED, GATHERED)]
    for cuts in (cut, kept):
        trained = run_ranks(3, f"{HERE}trained", cuts, [("adamw", "clip")])
        check([told for (told,) in trained], single("adamw", "clip"))


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "adamw"])
def test_dcp_saves_and_another_plan_and_another_number_of_ranks_go_on(tmp_path: Path, optimizer: str) -> None:
    folder, wanted = str(tmp_path / "dcp"), single(optimizer, "nothing")[1]
    of = {"sgd": "states", "adamw": "fewer"}[optimizer]
    early, late = run_ranks(4, f"{STATES}saved", PLANS[of][1], folder, optimizer)[0]
    close(late, wanted)
    on_one: dtensor_ranks.Cuts = [{}] * 4  # rank 1 has no parameters
    close(run_ranks(2, f"{STATES}saved", on_one, f"{folder} of one", optimizer)[0][1], wanted)
    for state in run_ranks(2, f"{STATES}resumed", PLANS["channels"][1], f"{folder} of one", optimizer):
        close(state, wanted)
    others = [
        (2, on_one),
        (4, PLANS["states"][1]),
        (2, PLANS["channels"][1]),
        (2, [{"n": 2} | GATHERED] * 4),
        (2, [{"n": 2}] * 4),
    ]
    for ranks, cuts in others[optimizer == "adamw" :: 2]:
        for state in run_ranks(ranks, f"{STATES}resumed", cuts, folder, optimizer):
            close(state, wanted)
    model = copy.deepcopy(original())
    state = model.state_dict()
    dcp.load(state, checkpoint_id=Path(folder) / "model", no_dist=True)
    close(state, early, 0.0)
    dcp_to_torch_save(Path(folder) / "model", tmp_path / "model.pt")
    model.load_state_dict(torch.load(tmp_path / "model.pt"))
    close(model.state_dict(), early, 0.0)


@pytest.mark.parametrize("optimizer", [pytest.param("momentum", marks=pytest.mark.slow), "adamw_fused"])
def test_dcp_reads_layerwises_checkpoints(tmp_path: Path, optimizer: str) -> None:
    """Another plan and another number of ranks go on from one, by layerwise.checkpoint and by dcp alike."""
    folder, wanted = tmp_path / "ck", single(optimizer, "nothing")[1]
    early, late = run_ranks(4, f"{STATES}checkpointed", PLANS["mixed"][1], str(folder), optimizer)[0]
    close(late, wanted)
    for ranks, cuts in [PLANS["fewer"], (2, PLANS["channels"][1]), (2, [{"n": 2}] * 4)]:
        for state in run_ranks(ranks, f"{STATES}taken_up", cuts, str(folder), optimizer):
            close(state, wanted)
    model = copy.deepcopy(original())
    reader = dcp.HuggingFaceStorageReader(str(folder / "step-00000002"))
    dcp.load({"model": model.state_dict()}, storage_reader=reader, no_dist=True)
    close(model.state_dict(), early, 0.0)


@pytest.mark.parametrize("name", SEVERAL)
def test_a_whole_state_dict_is_taken(name: str) -> None:
    ranks, cuts = PLANS[name]
    run_ranks(ranks, f"{STATES}given", cuts, single("sgd", "nothing", 1)[1])


def test_random_numbers_beside_a_parameter_are_rank_0s() -> None:
    """Before PyTorch 2.13 they are refused where a gradient is wanted, as autograd would need them again."""
    first, second = run_ranks(2, f"{HERE}drawn", PLANS["filters"][1])
    if not DISPATCHES:
        assert first == second
        assert "dropout draws random numbers beside a parameter that the plan splits" in first
        return
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert set(first[1].round(decimals=9).flatten().tolist()) == {0.0, 8.0}
