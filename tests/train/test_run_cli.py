"""layerwise run, as a user and as a program see it: in this process with one rank, under torchrun with two."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from layerwise.__main__ import dispatch
from layerwise.checkpoint.agree import agree
from layerwise.checkpoint.weights_file import fingerprint
from layerwise.cli import run_main
from layerwise.comm.base import Comm, CommError
from layerwise.comm.thread import run_threads
from layerwise.errors import LayerwiseError
from layerwise.run.__main__ import _flags, _hushed, parser
from tests.run.small_plans import plan

MLP = "mlp:64x12x10"
RESULT = {
    "model", "io", "world_size", "steps", "losses", "accuracy", "step_time_s", "bytes_sent", "bytes_predicted",
    "compare",
}  # fmt: skip
PREDICTED = {"transfer_bytes": 2 * 2 * 4 * (4 * 12 + 4 * 5), "sync_bytes": 2 * 4 * 12 * 65, "statistics_bytes": 0}
Run = Callable[..., str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test in a directory of its own, with plans in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    plan(MLP, 8, 1).save("one.json")
    replace(plan(MLP, 8, 1), provenance={"cost_options": {"local_batch_norm": True}}).save("local.json")
    two = plan(MLP, 8, 2, {"0": {"n": 2}, "2": {"c": 2}})
    replace(two, predicted=PREDICTED).save("two.json")
    plan(MLP, 8, 2, {"0": {"c": 2}, "2": {"c": 2}}, "free").save("free.json")
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command that must succeed; returns its stdout."""

    def go(*argv: str) -> str:
        assert run_main(dispatch, ["run", *argv]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return go


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root, "PYTHONUNBUFFERED": "1"}


def torchrun(*argv: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, "-m", "layerwise.run", *argv], capture_output=True, text=True, timeout=300, env=environment()
    )


def strict(text: str) -> Any:
    """JSON without NaN."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# ------------------------------------------------------------------------------------------------------ one rank


def test_one_rank_without_torchrun(run: Run) -> None:
    out = run("one.json", "--steps", "3")
    assert f"{MLP} on 1 ranks, 8 samples a batch, io sample" in out
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
    assert len(result["losses"]) == 3
    assert result["bytes_sent"] == {"transfers": 0, "sync": 0, "statistics": 0}
    assert result["bytes_predicted"] == {"transfers": None, "sync": None, "statistics": None}  # a plan by hand
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
    result = strict(run("one.json", "--steps", "8", "--lr", "1e30", "--json"))
    assert result["losses"][-1] is None
    assert "no finite number any more: try a smaller --lr" in run("one.json", "--steps", "8", "--lr", "1e30")


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


def test_resuming_says_what_it_does(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("one.json", "--checkpoint", "ck", "--resume", "--steps", "3")
    assert "no checkpoint in ck: starting anew" in run(*flags, "--checkpoint-every", "2")
    assert sorted(path.name for path in Path("ck").iterdir()) == ["step-00000002", "step-00000003"]
    assert "going on from ck/step-00000003" in run(*flags)
    assert "nothing to do: the checkpoint has 3 steps already" in run(*flags)
    for changed, reason in (
        (("--seed", "3"), "was trained with seed 0, here it is 3"),
        (
            ("--lr", "0.5"),
            "was trained with optimizer sgd, lr 0.1, weight decay 0, here it is sgd, lr 0.5, weight decay 0",
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

BAD = [
    ("two.json", "the plan is for 2 ranks, there is 1: start them with torchrun --nproc-per-node 2"),
    ("missing.json", "plan 'missing.json' cannot be read"),
    ("one.json --data cifar", "unknown data 'cifar'"),
    ("one.json --data no.module:f", "raised ModuleNotFoundError"),
    ("one.json --steps 0", "'0' is not a whole number of at least 1"),
    ("one.json --epochs two", "'two' is not a whole number of at least 1"),
    ("one.json --steps 3 --epochs 1", "not allowed with"),
    ("one.json --lr 0", "'0' is not a number above 0"),
    ("one.json --lr nan", "'nan' is not a number above 0"),
    ("one.json --momentum 1", "'1' is not a number of at least 0 and below 1"),
    ("one.json --accumulate 1000", "too few for one step of the plan's batch of 8 and --accumulate 1000"),
    ("one.json --dtype float16", "invalid choice: 'float16'"),
    ("one.json --optimizer lion", "invalid choice: 'lion'"),
    ("one.json --resume", "need --checkpoint DIR"),
    ("one.json --checkpoint-every 3", "need --checkpoint DIR"),
    ("one.json --checkpoint ''", "--checkpoint is empty: name a folder"),
    ("one.json --checkpoint a\0b", "--checkpoint a\0b: embedded null byte"),
    ("one.json --checkpoint two.json", "--checkpoint two.json: File exists"),
    ("one.json --checkpoint two.json/ck", "--checkpoint two.json/ck: Not a directory"),
    ("one.json --checkpoint ck --data cifar", "unknown data 'cifar'"),
    ("one.json --checkpoint ck/a --trace missing/t.json", "'missing/t.json' cannot be written"),
    ("one.json --compare-single --local-batch-norm", "leave out --compare-single"),
    ("local.json --compare-single", "give --no-local-batch-norm"),
    ("one.json --trace missing/t.json", "'missing/t.json' cannot be written"),
    ("one.json --weights missing.safetensors", "weights 'missing.safetensors' cannot be read as safetensors"),
    ("one.json --weights one.json", "weights 'one.json' cannot be read as safetensors"),
    ("one.json --timeout 0", "'0' is not a number above 0"),
]


@pytest.mark.parametrize(("line", "reason"), BAD, ids=[line for line, _ in BAD])
def test_mistakes(line: str, reason: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(here.iterdir())
    assert run_main(dispatch, ["run", *shlex.split(line)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("layerwise: error: ")
    assert err.count("\n") == 1
    assert reason in err
    assert sorted(here.iterdir()) == before


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
    assert len(commands) == 5
    for command in commands:  # the examples are valid
        parser().parse_args(command.split())


def test_ctrl_c() -> None:
    command = [sys.executable, "-m", "layerwise.run", "one.json", "--epochs", "500"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where CI runs in the background
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step"):
                break
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "layerwise: interrupted\n"


# ------------------------------------------------------------------------------------------------------ two ranks


def test_two_ranks_equal_one_device() -> None:
    flags = ("--dtype", "float64", "--steps", "4", "--compare-single", "--json", "--checkpoint", "ck")
    first = torchrun("two.json", *flags, "--trace", "trace.json", "--accumulate", "2", "--clip-norm", "0.5")
    assert first.returncode == 0, first.stderr
    result = strict(first.stdout)
    assert set(result) == RESULT
    assert (result["world_size"], result["steps"], len(result["losses"])) == (2, 4, 4)
    assert set(result["compare"]) == {"loss", "gradients", "parameters", "buffers"}
    assert max(result["compare"].values()) < 1e-9
    # Float64. A step of two batches of 8: 4 x 12 of the hidden layer to the other rank, and back its gradient; then
    # 5 of 10 outputs for 4 samples to the other, and back. One sum of 12 x 65 gradients by two ranks.
    assert result["bytes_sent"] == {
        "transfers": 2 * 2 * 2 * 8 * (4 * 12 + 4 * 5), "sync": 2 * 8 * 12 * 65, "statistics": 0,
    }  # fmt: skip
    assert result["bytes_predicted"] == result["bytes_sent"]  # though the plan counts in float32
    assert first.stderr.count("step 4/4") == 1  # rank 0 alone speaks
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    for pid in (0, 1):
        names = {event["name"] for event in events if event["pid"] == pid and event["ph"] == "X"}
        assert {"0", "2", "0 -> 2"} <= names
    # Another plan goes on where this one stopped, as one device would.
    flags = ("--dtype", "float64", "--steps", "6", "--checkpoint", "ck", "--resume", "--accumulate", "2")
    rest = torchrun("free.json", *flags, "--clip-norm", "0.5", "--json", "--compare-single")
    assert rest.returncode == 0, rest.stderr
    assert "going on from ck/step-00000008" in rest.stderr  # forwards: two a step
    assert max(strict(rest.stdout)["compare"].values()) < 1e-9
    alone = subprocess.run(
        [sys.executable, "-m", "layerwise.run", "one.json", "--dtype", "float64", "--steps", "6", "--json",
         "--accumulate", "2", "--clip-norm", "0.5"],
        capture_output=True, text=True, env=environment(),
    )  # fmt: skip
    losses = result["losses"] + strict(rest.stdout)["losses"]
    assert losses == pytest.approx(strict(alone.stdout)["losses"], rel=1e-9)
    assert strict(rest.stdout)["accuracy"] == strict(alone.stdout)["accuracy"]


NOISY = """
import torch
def data():
    import os
    torch.manual_seed(int(os.environ["RANK"]))
    return torch.rand(40, 64), torch.randint(10, (40,))
"""


def test_ranks_with_different_data_are_refused(here: Path) -> None:
    (here / "noisy.py").write_text(NOISY)
    done = torchrun("two.json", "--data", "noisy:data")
    assert done.returncode != 0
    assert "the ranks differ in data" in done.stderr
    assert done.stdout == ""


FLAGS = [
    ("--checkpoint ck", "", "--checkpoint: ck on rank 0, none on rank 1"),
    ("--checkpoint a", "--checkpoint b", "--checkpoint: a on rank 0, b on rank 1"),
    ("--resume", "", "--resume: yes on rank 0, no on rank 1"),
    ("--checkpoint-every 2", "--checkpoint-every 3", "--checkpoint-every: 2 on rank 0, 3 on rank 1"),
    ("--trace t.json", "", "--trace: t.json on rank 0, none on rank 1"),
    ("--steps 2", "--epochs 2", "--epochs: none on rank 0, 2 on rank 1"),
    ("--timeout 3", "", "--timeout: 3.0 on rank 0, 30.0 on rank 1"),
    ("", "--no-local-batch-norm", "--local-batch-norm: none on rank 0, no on rank 1"),
    ("--compare-single", "", "--compare-single: yes on rank 0, no on rank 1"),
    ("--compare", "", "--compare: yes on rank 0, no on rank 1"),
    ("--lr 0.1", "--lr 0.2", "--lr: 0.1 on rank 0, 0.2 on rank 1"),
    ("--data digits", "--data mnist5k", "--data: digits on rank 0, mnist5k on rank 1"),
]


@pytest.mark.parametrize(("first", "second", "reason"), FLAGS, ids=[reason for *_, reason in FLAGS])
def test_ranks_that_differ_in_a_flag_are_told_which(first: str, second: str, reason: str) -> None:
    facts = [_flags(parser().parse_args(["two.json", *line.split()])) for line in (first, second)]
    with pytest.raises(CommError, match=f"the ranks differ in {reason}; every rank must be given the same"):
        run_threads(2, lambda comm: comm.handshake(facts[comm.rank]))


def test_ranks_may_have_their_plan_and_weights_elsewhere() -> None:
    lines = (["a/two.json", "--weights", "a/w.safetensors", "--json"], ["b/two.json", "--weights", "b/w.safetensors"])
    facts = [_flags(parser().parse_args(line)) for line in lines]
    run_threads(2, lambda comm: comm.handshake(facts[comm.rank]))


def test_weights_are_told_apart_by_what_is_in_them(here: Path) -> None:
    values = torch.zeros(300_000)
    save_file({"0.weight": values}, "a.safetensors")
    save_file({"0.weight": values}, "same.safetensors")
    save_file({"0.weight": values + 1}, "other.safetensors")
    assert fingerprint("a.safetensors") == fingerprint("same.safetensors") != fingerprint("other.safetensors")


def test_ranks_that_differ_in_a_flag_under_torchrun(here: Path) -> None:
    """One of them saves, the other does not."""
    (here / "own_flags.py").write_text(
        "import os, sys\n"
        "from layerwise.cli import run_main\n"
        "from layerwise.run.__main__ import main\n"
        "own = ['--checkpoint', 'ck'] if os.environ['RANK'] == '0' else []\n"
        "sys.exit(run_main(main, ['two.json', '--steps', '1', *own]))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "own_flags.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment())
    assert "layerwise: error: the ranks differ in --checkpoint: ck on rank 0, none on rank 1" in done.stderr
    assert "KeyError" not in done.stderr
    assert not (here / "ck").exists()


def test_a_folder_that_rank_0_cannot_write_is_told_by_all(here: Path) -> None:
    done = torchrun("two.json", "--checkpoint", "two.json")
    assert done.stderr.count("layerwise: error: rank 0: --checkpoint two.json: File exists\n") == 2
    assert "gone" not in done.stderr


def test_ranks_that_are_not_called_alike(here: Path) -> None:
    def act(comm: Comm) -> None:
        if comm.rank == 0:
            agree(comm, lambda: (None, None), "nothing was saved")
        else:
            comm.tell_all(json.dumps({"transfers": 12}))

    with pytest.raises(
        LayerwiseError, match="nothing was saved: rank 1 does something else: every rank must be called"
    ):
        run_threads(2, act)


def test_a_mistake_under_torchrun_is_told_once() -> None:
    done = torchrun("missing.json")
    assert done.returncode != 0
    assert done.stderr.count("layerwise: error: plan 'missing.json' cannot be read") == 1
    assert 'Traceback (most recent call last):\n  File "' + str(Path(__file__).parents[2]) not in done.stderr


def test_a_mistake_of_one_rank_is_told_by_all(here: Path) -> None:
    """Rank 1 has no plan, rank 0 (which has) does not wait for the time-out."""
    (here / "own_plan.py").write_text(
        "import os, sys\n"
        "from layerwise.cli import run_main\n"
        "from layerwise.run import __main__ as room\n"
        "room.PATIENCE_S = 5.0\n"
        "if os.environ['RANK'] == '1':\n"
        "    sys.argv[1] = 'missing.json'\n"
        "sys.exit(run_main(room.main))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "own_plan.py"]
    done = subprocess.run(
        [*command, "two.json", "--timeout", "200"], capture_output=True, text=True, timeout=150, env=environment()
    )
    told = "plan 'missing.json' cannot be read: No such file or directory"
    assert f"layerwise: error: {told}\n" in done.stderr
    assert f"layerwise: error: rank 1 of 2 failed before its first step: {told}" in done.stderr
    assert "exitcode  : 2 " in done.stderr


def test_ctrl_c_is_told_by_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setenv("RANK", "1")
    assert _hushed(interrupted) == 130
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(KeyboardInterrupt):
        _hushed(interrupted)


def test_a_difference_ends_with_1(here: Path) -> None:
    """float32 is not float64: what is allowed there is a mistake here."""
    (here / "strict_run.py").write_text(
        "import sys\n"
        "from layerwise.cli import run_main\n"
        "from layerwise.train import compare\n"
        "compare.ALLOWED['float32'] = 1e-15\n"
        "from layerwise.run.__main__ import main\n"
        "sys.exit(run_main(main))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "strict_run.py"]
    done = subprocess.run(
        [*command, "two.json", "--steps", "3", "--compare-single"],
        capture_output=True, text=True, timeout=300, env=environment(),
    )  # fmt: skip
    assert done.returncode == 1
    assert "more than 1e-15, which float32 allows" in done.stdout
    assert "exitcode  : 1 " in done.stderr
