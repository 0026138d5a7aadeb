"""layerwise oracle, as a user and as a program see it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from layerwise.__main__ import dispatch
from layerwise.cli import run_main
from layerwise.plan import load_plan

Run = Callable[..., str]
LENET = ("lenet5", "--profile", "v100", "--batch", "8")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a question that must be answered; returns its stdout."""

    def go(*argv: str) -> str:
        assert run_main(dispatch, ("oracle", *argv)) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return go


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str], here: Path) -> Run:
    """Runs a question that must be refused; returns its one line of stderr."""

    def go(*argv: str) -> str:
        before = sorted(here.iterdir())
        assert run_main(dispatch, ("oracle", *argv)) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("layerwise: error: ")
        assert err.count("\n") == 1
        assert sorted(here.iterdir()) == before
        return err

    return go


BAD = [
    (
        "lenet5 --gpus 8 --strategy filter",
        "filter cannot use 8 devices: at most 6, by layer 'features.0' with 6",
    ),
    ("vgg16 --gpus 128,256 --strategy channel", "at most 64, by layer 'features.2' with 64 input channels"),
    ("lenet5 --gpus 4 --strategy serial", "serial cannot use 4 devices: at most 1"),
    ("lenet5 --gpus 8 --scaling strong --batch 4 --strategy data", "at most 4, by the batch of 4 samples"),
    ("lenet5 --gpus 8 --scaling strong", "needs --batch B"),
    ("lenet5 --gpus 8 --strategy dta", "unknown strategy 'dta' (did you mean 'data'?)"),
    ("lenet5 --gpus 8 --strategy ,", "--strategy ','"),
    ("lenet5 --gpus 2 --strategy df", "at least two groups of two devices"),
    ("mlp:8x8x8 --gpus 4 --strategy spatial", "no layer has positions to cut"),
    ("lenet5 --gpus 4 --strategy spatial --gather-after features.9", "no such layer (did you mean"),
    ("lenet5 --gpus 4 --strategy spatial --spatial-dims h,x", "--spatial-dims 'h,x'"),
    ("lenet5 --gpus five", "'five' is not numbers of GPUs"),
    ("lenet5 --gpus 8..4", "the smaller number first"),
    ("lenet5 --gpus 6", "6 GPUs do not fill nodes of 4"),
    ("lenet5 --gpus 4 --batch 0", "'0' is not a whole number of at least 1"),
    ("lenet5 --gpus 4 --samples -1", "'-1' is not a whole number"),
    ("lenet5 --gpus 4 --max-hours 0", "'0' is not a number above 0"),
    ("lenet5 --gpus 4 --plan plan.json", "name one --strategy and one number of --gpus"),
    ("lenet5 --gpus 4 --strategy data --plan no/plan.json", "cannot be written"),
    ("lenet5 --gpus 4 --strategy data --plan both.png --plot ./both.png", "name the same file"),
    ("lenet5 --gpus 4 --formulas published", "unrecognized arguments: --formulas published"),
    ("lenet5 --gpus 4 --strategy pipeline --plan plan.json", "pipeline is not a configuration for every layer"),
    ("lenet5 --gpus 4 --plot figure.doc", "must end in .png"),
    ("lenet5 --gpus 4 --plot no/figure.png", "cannot be written"),
    ("lenet5 --gpus 4 --plot a.png --plot-phases a.png", "--plot and --plot-phases name the same file"),
    ("lenet5 --gpus 4 --measured runs.json", "cannot be read"),
    ("lenet5 --gpus 4 --profile v10", "did you mean v100?"),
    ("lenet6 --gpus 4", "unknown model 'lenet6'"),
    ("lenet5 --gpus 128 --strategy layerwise", "searched for up to 64 GPUs"),
    (f"lenet5 --gpus 4 --batch 1{'0' * 40}", "at most 1,073,741,824 samples a step"),
    (f"lenet5 --gpus 4 --samples 1{'0' * 400}", "is not a number of samples below 10^15"),
]


@pytest.mark.parametrize(("line", "reason"), BAD, ids=[line for line, _ in BAD])
def test_bad_input(refuse: Run, line: str, reason: str) -> None:
    assert reason in refuse(*line.split(), *(() if "--profile" in line else ("--profile", "v100")))


def test_measured_file_with_a_missing_field(refuse: Run, here: Path) -> None:
    (here / "runs.json").write_text('{"runs": [{"strategy": "data", "gpus": 2, "iteration_s": 0.1}]}')
    assert "run 1: 'batch' is missing" in refuse("lenet5", "--measured", "runs.json")
    (here / "runs.json").write_text('{"runs": [{"strategy": "filter", "gpus": 8, "batch": 8, "iteration_s": 0.1}]}')
    assert "measured run 1: filter cannot use 8 devices: at most 6" in refuse("lenet5", "--measured", "runs.json")


def test_answers_for_people(run: Run) -> None:
    text = run(*LENET, "--gpus", "1..8", "--max-gpus", "4")
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "data" in rows["GPUs"]
    assert "layerwise" in rows["GPUs"]
    assert rows["8"].split()[1] == "-"  # serial
    assert "'features.0' with 6 output channels" in text
    assert "Suggestion (fastest with at most 4 GPUs): " in text
    assert "Runner-up: " in text


def test_a_batch_of_all_gpus_together_is_given_as_to_search(run: Run, refuse: Run) -> None:
    whole, each = ("--global-batch", "64"), ("--scaling", "strong", "--batch", "64")
    asked = ("lenet5", "--profile", "v100", "--gpus", "2,4", "--strategy", "data", "--json")
    assert run(*asked, *whole) == run(*asked, *each)
    assert "not allowed with" in refuse(*asked, *whole, "--batch", "8")
    assert "with --scaling weak give --batch" in refuse(*asked, *whole, "--scaling", "weak")


def test_answers_for_programs(run: Run) -> None:
    found = json.loads(run(*LENET, "--gpus", "1,4", "--json", "--samples", "6400", "--optimizer", "adam"))
    answers = {(a["strategy"], a["gpus"]): a for a in found["answers"]}
    data = answers["data", 4]
    assert (data["batch"], data["iterations_per_epoch"]) == (32, 200)
    assert data["epoch"]["total_s"] == pytest.approx(200 * data["iteration"]["total_s"])
    parts = ("compute_s", "update_s", "gather_s", "reduce_s", "halo_s", "passing_s", "gradient_s")
    assert sum(data["iteration"][key] for key in parts) == pytest.approx(data["iteration"]["total_s"])
    assert data["iteration"]["gradient_s"] > 0 == data["iteration"]["halo_s"]
    assert answers["spatial", 4]["iteration"]["halo_s"] > 0
    assert answers["pipeline", 4]["iteration"]["passing_s"] > 0
    assert {("serial", 4)} <= {(u["strategy"], u["gpus"]) for u in found["unreachable"]}
    assert found["limits"]["filter"] == {"devices": 6, "by": "layer 'features.0' with 6 output channels"}
    assert found["suggestion"]["best"]["strategy"] in found["limits"]
    assert 0 < data["memory_share"] < 1


def test_a_written_plan_is_priced_the_same(run: Run, here: Path) -> None:
    found = json.loads(run(*LENET, "--gpus", "2", "--strategy", "filter", "--plan", "plan.json", "--json"))
    plan = load_plan(here / "plan.json")
    assert (plan.io, plan.batch, plan.provenance["chosen"]) == ("free", 16, "filter")
    assert plan.predicted["step_time_s"] == pytest.approx(found["answers"][0]["iteration"]["total_s"])


def test_measured_runs(run: Run, here: Path) -> None:
    projected = json.loads(run(*LENET, "--gpus", "1..8", "--strategy", "data", "--json"))["answers"]
    runs = []
    for a in projected:
        seconds = a["iteration"]["overlapped_s"] * 1.25
        runs.append({"strategy": "data", "gpus": a["gpus"], "batch": a["batch"], "iteration_s": seconds})
    (here / "runs.json").write_text(json.dumps({"runs": runs}))
    found = json.loads(run(*LENET, "--measured", "runs.json", "--json"))["measured"]
    assert found["mean_accuracy"]["data"] == pytest.approx(0.8)
    assert not any(r["abnormal"] for r in found["runs"])
    runs.append(runs[-1] | {"iteration_s": runs[-1]["iteration_s"] * 4})
    (here / "runs.json").write_text(json.dumps(runs))
    text = run(*LENET, "--measured", "runs.json")
    assert text.count("ABNORMAL") == 1
    assert "mean accuracy: data " in text


def test_figure(run: Run, here: Path) -> None:
    pytest.importorskip("matplotlib")
    run(*LENET, "--gpus", "1..4", "--plot", "a.png", "--plot-phases", "b.png", "--strategy", "data,filter")
    assert all((here / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "b.png"))


def test_figure_of_measured_runs_alone(run: Run, here: Path) -> None:
    """Without --gpus there are no answers, and runs of several strategies, batches and repetitions."""
    pytest.importorskip("matplotlib")
    one = {"strategy": "data", "gpus": 2, "batch": 64, "iteration_s": 0.001}
    (here / "runs.json").write_text(json.dumps([one, one, one | {"batch": 8192}, one | {"strategy": "filter"}]))
    run(*LENET, "--measured", "runs.json", "--plot", "figure.png")
    assert (here / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_too_little_memory(run: Run) -> None:
    """In the unit of the flag."""
    at = ("--gpus", "1", "--strategy", "serial", "--max-memory", "0.0005")
    line = " ".join(run(*LENET, *at).split())
    assert "with 0.0005 GiB a device: none fits into memory: the least, serial at 1 GPU, needs 0.00" in line


def test_a_strategy_that_cannot_be_is_a_line(run: Run) -> None:
    text = run(*LENET, "--gpus", "2,8", "--strategy", "data,filter,df")
    rows = [line.split() for line in text[text.index("none on") :].splitlines()]
    assert {("filter", "8"), ("data+filter", "2")} <= {tuple(row[:2]) for row in rows}
    assert "by layer 'features.0' with 6 output channels" in " ".join(text.split())
    assert "Times and memory are of layerwise.run on this machine, by the cost tables." in " ".join(text.split())


def test_long_names_of_strategies(run: Run) -> None:
    found = json.loads(run(*LENET, "--gpus", "4", "--strategy", "data+filter", "--json"))
    assert [a["strategy"] for a in found["answers"]] == ["df"]


@pytest.mark.parametrize("columns", ["80", "100"])
def test_fits_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = run(*LENET, "--gpus", "1..8", "--phases")
    assert max(cell_len(line) for line in text.splitlines()) <= int(columns)
    assert "…" not in text
