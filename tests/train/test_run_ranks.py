"""layerwise run on two ranks: on processes that are forked as torchrun starts them, and under torchrun."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from layerwise.__main__ import dispatch
from layerwise.cli import run_main
from layerwise.comm.base import Comm, CommError
from layerwise.comm.together import agree
from layerwise.commands.run import _flags, _hushed
from layerwise.errors import LayerwiseError
from layerwise.tensorfile import fingerprint
from layerwise.train.flags import parser
from tests.comm.launch import ROOT, launch, torchrun
from tests.comm.thread import run_threads
from tests.train.command import MLP, RESULT, strict

RUN = ("-m", "layerwise.run")


pytestmark = pytest.mark.usefixtures("here")


def test_two_ranks_equal_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--dtype", "float64", "--steps", "4", "--compare-single", "--json", "--checkpoint", "ck")
    first = launch([*RUN, "two.json", *flags, "--trace", "trace.json", "--accumulate", "2", "--clip-norm", "0.5"])
    assert first.codes == [0, 0], first.stderr
    result = strict(first.stdout[0])
    assert set(result) == RESULT
    assert (result["world_size"], result["steps"], len(result["losses"])) == (2, 4, 4)
    assert set(result["compare"]) == {"loss", "gradients", "parameters", "buffers"}
    assert max(result["compare"].values()) < 1e-9
    # Float64. A step of two batches of 8: 4 x 12 of the hidden layer to the other rank, and back its gradient; then
    # 5 of 10 outputs for 4 samples to the other, and back. One sum of 12 x 65 gradients by two ranks.
    assert result["bytes_sent"] == {
        "transfers": 2 * 2 * 2 * 8 * (4 * 12 + 4 * 5), "sync": 2 * 8 * 12 * 65, "gathers": 0,
        "statistics": 0,
    }  # fmt: skip
    assert result["bytes_predicted"] == dict.fromkeys(result["bytes_sent"])  # as the plan counts in float32
    assert "step 4/4" in first.stderr[0]
    assert (first.stdout[1], first.stderr[1]) == ("", "")  # rank 0 alone speaks
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    for pid in (0, 1):
        names = {event["name"] for event in events if event["pid"] == pid and event["ph"] == "X"}
        assert {"0", "2", "0 -> 2"} <= names
    # Another plan goes on where this one stopped, as one device would.
    flags = ("--dtype", "float64", "--steps", "6", "--checkpoint", "ck", "--resume", "--accumulate", "2")
    rest = launch([*RUN, "free.json", *flags, "--clip-norm", "0.5", "--json", "--compare-single"])
    assert rest.codes == [0, 0], rest.stderr
    assert "going on from ck/step-00000008" in rest.stderr[0]  # forwards: two a step
    resumed = strict(rest.stdout[0])
    assert max(resumed["compare"].values()) < 1e-9
    flags = ("--dtype", "float64", "--steps", "6", "--json", "--accumulate", "2", "--clip-norm", "0.5")
    assert run_main(dispatch, ["run", "one.json", *flags]) == 0
    alone = strict(capsys.readouterr().out)
    assert result["losses"] + resumed["losses"] == pytest.approx(alone["losses"], rel=1e-9)
    assert resumed["accuracy"] == alone["accuracy"]


NOISY = """
import torch
def data():
    import os
    torch.manual_seed(int(os.environ["RANK"]))
    return torch.rand(40, 64), torch.randint(10, (40,))
"""


def test_ranks_with_different_data_are_refused(here: Path) -> None:
    (here / "noisy.py").write_text(NOISY)
    done = launch([*RUN, "two.json", "--data", "noisy:data"])
    assert done.codes == [2, 2]
    assert all("the ranks differ in data" in stderr for stderr in done.stderr)
    assert done.stdout == ["", ""]


TAIL = """
import torch
def data():
    samples = torch.rand(17, 64), torch.arange(17) % 10
    return samples, samples
"""


def test_another_number_of_steps_an_epoch_is_told(here: Path) -> None:
    """A last sample is a step for one rank, and too few for two: step 3 would be of other samples."""
    (here / "tail.py").write_text(TAIL)
    flags = ("--data", "tail:data", "--checkpoint", "ck", "--resume")
    for steps, code in (("1", 0), ("3", 2)):
        assert run_main(dispatch, ["run", "one.json", *flags, "--steps", steps]) == 0
        done = launch([*RUN, "two.json", *flags, "--steps", steps])
        assert done.codes == [code, code], done.stderr
    assert "was trained with 3 steps an epoch, but here there are 2, as the last samples" in done.stderr[0]


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
    ("--lr 0.1", "--lr 0.2", "--lr: 0.1 on rank 0, 0.2 on rank 1"),
    ("--data digits", "--data mnist5k", "--data: digits on rank 0, mnist5k on rank 1"),
]


@pytest.mark.parametrize(("first", "second", "reason"), FLAGS, ids=[reason for *_, reason in FLAGS])
def test_ranks_that_differ_in_a_flag_are_told_which(first: str, second: str, reason: str) -> None:
    facts = [_flags(parser().parse_args(["two.json", *line.split()])) for line in (first, second)]
    with pytest.raises(CommError, match=f"the ranks differ in {reason}: start every rank with the same"):
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


def test_rank_0_alone_plans_for_the_ranks_there_are(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However long it takes: here for three time-outs."""
    flags = ["--gpus", "1", "--profile", "cpu", "--gpus-per-node", "2", "--global-batch", "8"]
    assert run_main(dispatch, ["search", MLP, *flags, "--out", "searched.json"]) == 0
    capsys.readouterr()
    (here / "slowly.py").write_text(
        "import os, sys, time\n"
        "from layerwise.cli import run_main\n"
        "from layerwise.commands import run as room\n"
        "quick = room.replan\n"
        "def replan(*args, **options):\n"
        "    assert os.environ['RANK'] == '0'\n"
        "    time.sleep(6)\n"
        "    return quick(*args, **options)\n"
        "room.replan = replan\n"
        "sys.exit(run_main(room.main))\n"
    )
    run = ("--dtype", "float64", "--steps", "3", "--json", "--compare-single", "--timeout", "2")
    done = launch(["slowly.py", "searched.json", "--replan", *run])
    assert done.codes == [0, 0], done.stderr
    assert strict(done.stdout[0])["world_size"] == 2


def test_ranks_of_which_one_saves(here: Path) -> None:
    (here / "own_flags.py").write_text(
        "import os, sys\n"
        "from layerwise.cli import run_main\n"
        "from layerwise.commands.run import main\n"
        "own = ['--checkpoint', 'ck'] if os.environ['RANK'] == '0' else []\n"
        "sys.exit(run_main(main, ['two.json', '--steps', '1', *own]))\n"
    )
    done = launch(["own_flags.py"])
    assert done.codes == [2, 2]
    differ = "layerwise: error: the ranks differ in --checkpoint: ck on rank 0, none on rank 1"
    assert all(stderr.startswith(differ) and stderr.count("\n") == 1 for stderr in done.stderr), done.stderr
    assert not (here / "ck").exists()


def test_a_folder_that_rank_0_cannot_write_is_told_by_all(here: Path) -> None:
    done = launch([*RUN, "two.json", "--checkpoint", "two.json"])
    assert done.codes == [2, 2]
    assert done.stderr == ["layerwise: error: rank 0: --checkpoint two.json: File exists\n"] * 2


def test_ranks_that_are_not_called_alike(here: Path) -> None:
    def act(comm: Comm) -> None:
        if comm.rank == 0:
            agree(comm, lambda: (None, None), "nothing was saved")
        else:
            comm.all_gather_text(json.dumps({"transfers": 12}))

    with pytest.raises(LayerwiseError, match="nothing was saved: rank 1 does something else: call this on every rank"):
        run_threads(2, act)


def test_a_mistake_under_torchrun_is_told_once() -> None:
    done = torchrun([*RUN, "missing.json"])
    assert done.codes != [0]
    assert done.stderr[0].count("layerwise: error: plan 'missing.json' cannot be read") == 1
    assert str(ROOT / "layerwise") not in done.stderr[0]  # no traceback of ours; torchrun has its own


def test_a_mistake_of_one_rank_is_told_by_all(here: Path) -> None:
    """Rank 1 has no plan, rank 0 (which has) does not wait for the time-out."""
    (here / "own_plan.py").write_text(
        "import os, sys\n"
        "from layerwise.cli import run_main\n"
        "from layerwise.commands import run as room\n"
        "room.PATIENCE_S = 2.0\n"
        "if os.environ['RANK'] == '1':\n"
        "    sys.argv[1] = 'missing.json'\n"
        "sys.exit(run_main(room.main))\n"
    )
    done = launch(["own_plan.py", "two.json", "--timeout", "200"])
    told = "plan 'missing.json' cannot be read: No such file or directory"
    assert done.stderr[1] == f"layerwise: error: {told}\n"
    assert f"layerwise: error: rank 1 of 2 failed before its first step: {told}" in done.stderr[0]
    assert done.codes == [2, 2]


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
        "from layerwise.commands.run import main\n"
        "sys.exit(run_main(main))\n"
    )
    done = launch(["strict_run.py", "two.json", "--data", "synthetic", "--steps", "3", "--compare-single"])
    assert done.codes == [1, 1]
    assert "more than 1e-15, which float32 allows" in " ".join(done.stdout[0].split())
