"""layerwise oracle, as a user and as a program see it."""

import json
from pathlib import Path

import pytest
from rich.cells import cell_len

from layerwise.plan import load_plan
from tests.cli.commands import Run

LENET = ("oracle", "lenet5", "--profile", "v100", "--batch", "8")


@pytest.fixture(autouse=True)
def _wide(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def test_a_measured_run_that_cannot_have_been(refuse: Run, here: Path) -> None:
    (here / "runs.json").write_text('{"runs": [{"strategy": "filter", "gpus": 8, "batch": 8, "iteration_s": 0.1}]}')
    assert "measured run 1: filter cannot use 8 devices: at most 6" in refuse(
        "oracle", "lenet5", "--measured", "runs.json"
    )


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
    asked = ("oracle", "lenet5", "--profile", "v100", "--gpus", "2,4", "--strategy", "data", "--json")
    assert run(*asked, *whole) == run(*asked, *each)
    assert "not allowed with" in refuse(*asked, *whole, "--batch", "8")
    assert "with --scaling weak, pass --batch" in refuse(*asked, *whole, "--scaling", "weak")


def test_a_sample_on_several_gpus(run: Run, refuse: Run) -> None:
    """Below one sample a GPU inputs are boxes, and a number of GPUs with a part of a sample has no answer."""
    asked = ("oracle", "cosmoflow:64", "--profile", "v100", "--gpus", "2,4,16", "--strategy", "spatial,ds", "--json")
    found = json.loads(run(*asked, "--batch", "0.25"))
    assert [(a["strategy"], a["gpus"], a["batch"]) for a in found["answers"]] == [("spatial", 4, 1), ("ds", 16, 4)]
    reasons = {(u["strategy"], u["gpus"]): u["why"] for u in found["unreachable"]}
    assert reasons["spatial", 2] == "0.25 samples a GPU on 2 of them are 0.5 samples, which is not an integer"
    boxes, free = (
        json.loads(run(*asked, "--batch", "0.25", "--io", io))["answers"][0]["memory_bytes"] for io in ("boxes", "free")
    )
    assert found["answers"][0]["memory_bytes"] == boxes < free
    said = " ".join(run(*asked[:-1], "--batch", "0.25").split())
    assert (
        "only the boxes of the inputs that its layers need (io boxes), since 4 samples are fewer than 16 devices"
        in said
    )
    assert "must be an integer" in refuse(*asked, "--scaling", "strong", "--batch", "0.25")
    assert "'0' is not a number above 0" in refuse(*asked, "--batch", "0")


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
    assert "with 0.0005 GiB a device: none fits into memory: the smallest, serial at 1 GPU, needs 0.00" in line


def test_a_strategy_that_cannot_be_is_a_line(run: Run) -> None:
    text = run(*LENET, "--gpus", "2,8", "--strategy", "data,filter,df")
    rows = [line.split() for line in text[text.index("none on") :].splitlines()]
    assert {("filter", "8"), ("data+filter", "2")} <= {tuple(row[:2]) for row in rows}
    assert "by layer 'features.0' with 6 output channels" in " ".join(text.split())
    assert "Times and memory are predictions for layerwise.run on this machine." in " ".join(text.split())


def test_long_names_of_strategies(run: Run) -> None:
    found = json.loads(run(*LENET, "--gpus", "4", "--strategy", "data+filter", "--json"))
    assert [a["strategy"] for a in found["answers"]] == ["df"]


def test_fits_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = run(*LENET, "--gpus", "1..8", "--phases")
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
