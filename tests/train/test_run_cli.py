"""layerwise run, as a user and as a program see it: in this process, with one rank."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from layerwise.__main__ import dispatch
from layerwise.checkpoint import latest
from layerwise.cli import run_main
from layerwise.train.flags import parser
from tests.train.command import MLP, RESULT, strict

Run = Callable[..., str]


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command that must succeed; returns its stdout."""

    def go(*argv: str) -> str:
        assert run_main(dispatch, ["run", *argv]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return go


# ------------------------------------------------------------------------------------------------------ one rank


def test_one_rank_without_torchrun(run: Run) -> None:
    out = run("one.json", "--steps", "3")
    assert f"{MLP} on 1 rank, 8 samples a batch, io sample" in out
    assert "digits: 1,438 samples to train on, 359 held out" in out
    lines = re.findall(r"^step (\d)/3  epoch 1  loss (\S+)  \S+ [mµ]?s  \S+ samples/s$", out, re.MULTILINE)
    assert [number for number, _ in lines] == ["1", "2", "3"]
    assert re.search(r"accuracy +\d+\.\d\d% of the held-out samples", out)


def test_json_is_all_of_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(dispatch, ["run", "one.json", "--steps", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    result = strict(out)
    assert set(result) == RESULT
    assert (result["model"], result["io"], result["world_size"], result["steps"]) == (MLP, "sample", 1, 3)
    assert result["peak_resident_bytes"] > 50e6  # PyTorch itself
    assert result["held_out_loss"] is None
    assert len(result["losses"]) == 3
    assert result["bytes_sent"] == dict.fromkeys(("transfers", "sync", "gathers", "statistics"), 0)
    assert result["bytes_predicted"] == dict.fromkeys(result["bytes_sent"])  # a plan by hand says nothing
    assert result["compare"] is None
    assert "step 3/3" in err


def test_training_learns_and_follows_the_seed(run: Run) -> None:
    flags = ("one.json", "--optimizer", "adam", "--epochs", "2", "--json")
    first = strict(run(*flags))
    assert first["steps"] == 2 * 180
    assert first["accuracy"] > 0.85
    assert first["losses"][-1] < first["losses"][0] / 2
    again, other = strict(run(*flags, "--seed", "0")), strict(run(*flags, "--seed", "1"))
    assert again["losses"] == first["losses"]
    assert other["losses"] != first["losses"]


def test_initial_values_from_a_file(run: Run) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {"0.weight": (12, 64), "0.bias": (12,), "2.weight": (10, 12), "2.bias": (10,)}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, "zeros.safetensors")
    save_file({name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}, "some.safetensors")
    zeros = strict(run("one.json", "--steps", "1", "--json", "--weights", "zeros.safetensors"))
    assert zeros["losses"] == [pytest.approx(2.302585, abs=1e-6)]  # log 10
    some = strict(run("one.json", "--steps", "2", "--json", "--compare-single", "--weights", "some.safetensors"))
    assert some["losses"][0] > 3
    assert some["compare"]["loss"] == 0


def test_a_loss_that_is_no_number_is_null(run: Run) -> None:
    flags = ("one.json", "--steps", "8", "--lr", "1e30", "--on-nan", "ignore")
    result = strict(run(*flags, "--json"))
    assert result["losses"][-1] is None
    assert "no longer finite: try a smaller --lr" in run(*flags)


def test_a_run_stops_after_its_last_finite_checkpoint(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """At this rate the second step's parameters are not finite."""
    flags = ("run", "one.json", "--steps", "8", "--lr", "1e300", "--dtype", "float64", "--checkpoint", "ck")
    assert run_main(dispatch, [*flags, "--checkpoint-every", "1"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    last = latest("ck")
    assert f"stopped; the last checkpoint is {last}; try a smaller --lr, or --on-nan ignore" in said
    assert last is not None
    assert run_main(dispatch, ["export", str(last), "model.safetensors"]) == 0
    assert all(bool(value.isfinite().all()) for value in load_file("model.safetensors").values())


def test_a_buffer_may_be_infinite(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    name = "tests.train.masked:network"
    flags = ["--gpus", "1", "--profile", "cpu", "--global-batch", "8", "--input-shape", "64", "--out", "masked.json"]
    assert run_main(dispatch, ["search", name, *flags]) == 0
    run("masked.json", "--model", name, "--steps", "2", "--checkpoint", "ck")
    assert latest("ck") is not None


def test_a_plan_of_two_ranks_is_searched_again_for_one(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same samples and, in float64, the same losses."""
    flags = ("--profile", "cpu", "--gpus-per-node", "2", "--global-batch", "8")
    for gpus in ("1", "2"):
        asked = ["search", MLP, "--gpus", gpus, *flags, "--out", f"{gpus}.json"]
        assert run_main(dispatch, asked) == 0
    capsys.readouterr()
    one, two = (strict(run(f"{n}.json", *how, "--steps", "3", "--json")) for n, how in ((1, ()), (2, ("--replan",))))
    assert one["losses"] == two["losses"]
    assert two["world_size"] == 1


def test_stopping_and_going_on_is_the_same_as_not_stopping(run: Run) -> None:
    flags = ("one.json", "--optimizer", "adam", "--data", "synthetic", "--json", "--dtype", "float64")
    whole = strict(run(*flags, "--steps", "9"))
    assert whole["accuracy"] is None
    first = strict(run(*flags, "--steps", "4", "--checkpoint", "ck", "--resume"))
    rest = strict(run(*flags, "--steps", "9", "--checkpoint", "ck", "--resume", "--compare-single"))
    assert first["losses"] + rest["losses"] == whole["losses"]
    assert rest["compare"] == {"loss": 0, "gradients": 0, "parameters": 0, "buffers": 0}
    done = strict(run(*flags, "--steps", "9", "--checkpoint", "ck", "--resume"))
    assert (done["steps"], done["losses"], done["step_time_s"], done["bytes_sent"]) == (0, [], None, None)


def test_a_run_does_not_save_beside_the_checkpoints_of_another(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("one.json", "--checkpoint", "ck", "--steps", "1")
    run(*flags)
    assert run_main(dispatch, ["run", *flags]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--checkpoint ck has a checkpoint already (step-00000001)" in said
    assert said.endswith("go on from it with --resume, or name another folder")


def test_resuming_says_what_it_does(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("one.json", "--checkpoint", "ck", "--resume", "--steps", "3")
    assert "no checkpoint in ck: starting anew" in run(*flags, "--checkpoint-every", "2")
    assert sorted(path.name for path in Path("ck").iterdir()) == ["step-00000002", "step-00000003"]
    assert "going on from ck/step-00000003" in run(*flags)
    assert "nothing to do: the checkpoint already has 3 steps" in run(*flags)
    for changed, reason in (
        (("--seed", "3"), "was trained with seed 0, but here it is 3"),
        (
            ("--lr", "0.5"),
            "was trained with optimizer sgd, lr 0.1, weight decay 0, but here it is sgd, lr 0.5, weight decay 0",
        ),
        (("--optimizer", "momentum"), "here it is momentum, lr 0.01, momentum 0.9, weight decay 0"),
        (("--weight-decay", "0.1"), "here it is sgd, lr 0.1, weight decay 0.1"),
    ):
        assert run_main(dispatch, ["run", *flags, *changed]) == 2
        out, err = capsys.readouterr()
        assert reason in err
        assert (out, err.count("\n")) == ("", 1)
    assert sorted(path.name for path in Path("ck").iterdir()) == ["step-00000002", "step-00000003"]


# ------------------------------------------------------------------------------------------------------ mistakes


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        dispatch(["run", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "layerwise.search lenet5 --gpus 2 --global-batch 64 --out plan.json" in text
    assert "torchrun --nproc-per-node 2 -m layerwise.run plan.json --data mnist5k" in text
    for action in parser()._actions:
        assert action.help
    commands = re.findall(r"-m layerwise\.run (.*)", text.replace("\\\n", " "))
    assert len(commands) == 4
    for command in commands:  # the examples are valid
        parser().parse_args(command.split())
