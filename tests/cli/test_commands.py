"""The commands as programs see them: JSON, files, and that they agree with each other."""

import json
import math
import os
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from layerwise.machine import load as load_profile
from layerwise.machine import save as save_profile
from layerwise.partition.buckets import BUCKET_BYTES
from layerwise.plan import checksum, load_plan
from tests.cases import case
from tests.cli.commands import LENET, MLP, NETWORKS, Run

NUMBERS = ("step_time_s", "timeline_s", "bytes_moved")


def finite(value: Any) -> None:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            finite(inner)
    elif isinstance(value, float):
        assert math.isfinite(value)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--gpus 1",
        "--gpus 8 --profile p100 --global-batch 3",
        "--profile pcie --dims n,c,k",
        "--gpus 12 --gpus-per-node 6 --degrees powers-of-two",
        "--no-fuse --dtype bfloat16 --optimizer adam",
        "--link-model sum --sync parameter-server --io free --objective additive",
        "--profile cpu --gpus 2 --local-batch-norm",
    ],
)
def test_json(run: Run, flags: str) -> None:
    found = json.loads(run("search", "lenet5", "--gpus", "4", *flags.split(), "--json"))
    finite(found)
    gpus = found["gpus"]
    assert found["model"] == "lenet5"
    for costs in (found, *(found["baselines"][name] for name in ("data", "model", "owt"))):
        assert all(isinstance(costs[key], int | float) and costs[key] >= 0 for key in NUMBERS)
        assert costs["step_time_s"] >= found["additive_optimum"]["step_time_s"] * (1 - 1e-9)
        assert costs["timeline_s"] > 0
    assert 0 < found["memory_bytes"] < 1e12
    assert isinstance(found["batch"], int)
    layers = found["strategy"]
    assert next(iter(layers)) == "features.0"
    assert set(layers) == set(found["additive_optimum"]["strategy"])
    for degrees in layers.values():
        assert all(isinstance(d, int) and d >= 1 for d in degrees.values())
        assert prod(degrees.values()) <= gpus
    if "additive" in flags:
        additive = found["additive_optimum"]
        assert (found["step_time_s"], layers) == (additive["step_time_s"], additive["strategy"])
    else:
        assert found["timeline_s"] <= found["baselines"]["data"]["timeline_s"]
    assert found["optimal"] is True
    assert found["lower_bound_s"] == pytest.approx(found["additive_optimum"]["step_time_s"])
    assert isinstance(found["final_nodes"], int)
    assert set(found["seconds"]) - {"overlap"} == {"import", "tables", "search"}
    assert all(isinstance(n, int) and n > 0 for n in found["configurations"].values())
    if "powers" in flags:  # 3 is no power of two, and no baseline's degree; 12 is one
        assert all(3 not in degrees.values() for degrees in found["additive_optimum"]["strategy"].values())
    assert found["io"] == ("free" if "free" in flags else "boxes" if found["batch"] < gpus else "sample")


def test_dims_restrict(run: Run) -> None:
    found = json.loads(run(*LENET, "--global-batch", "2", "--dims", "h,w", "--json"))
    baselines = {"n", "c"}  # baselines are always in the space
    used = {d for s in found["strategy"].values() for d, degree in s.items() if degree > 1}
    assert used <= {"h", "w"} | baselines
    wide = json.loads(run(*LENET, "--global-batch", "2", "--json"))
    assert wide["additive_optimum"]["step_time_s"] <= found["additive_optimum"]["step_time_s"]
    assert wide["configurations"]["total"] > found["configurations"]["total"]


def test_no_fuse_has_more_layers(run: Run) -> None:
    fused, plain = (json.loads(run(*LENET, *flag, "--json"))["strategy"] for flag in ((), ("--no-fuse",)))
    assert set(fused) < set(plain)


def test_price_round_trip(run: Run, here: Path) -> None:
    flags = (*LENET, "--profile", "p100", "--gpus", "8", "--global-batch", "4")
    text = run(*flags, "--json", "--out", "plan.json")
    (here / "s.json").write_text(text)
    found = json.loads(text)
    for file in ("s.json", "plan.json"):
        priced = json.loads(run(*flags, "--price", file, "--json"))
        finite(priced)
        assert {key: priced[key] for key in NUMBERS} == {key: found[key] for key in NUMBERS}
        assert priced["strategy"] == found["strategy"]
    table = run(*flags, "--price", "s.json")
    assert "\nyours " in table
    (here / "data").write_text(text)  # named as a baseline
    assert "\nyours " in run(*flags, "--price", "data")
    read, write = os.pipe()  # as a shell's --price <(command) has it
    with os.fdopen(write, "w") as pipe:
        json.dump(found["strategy"], pipe)
    assert "\nyours " in run(*flags, "--price", f"/dev/fd/{read}")
    os.close(read)


def test_a_plan_whose_profile_is_a_file_has_none_read(run: Run, refuse: Run, here: Path) -> None:
    """It may be anybody's, and name a device or a pipe, which never ends."""
    save_profile(load_profile("cpu"), "mine.json")
    run(*LENET, "--profile", "mine.json", "--out", "p.json")
    explain = ("explain", "p.json", "features.0")
    said = "the plan was found with profile 'mine.json', a file that a plan may not open: pass it with --profile"
    assert said in refuse(*explain)
    assert "configurations" in run(*explain, "--profile", "mine.json")
    os.mkfifo(here / "pipe.json")
    plan = load_plan("p.json")
    replace(plan, provenance={**plan.provenance, "profile": "pipe.json"}).save("p.json")
    assert "'pipe.json', a file" in refuse(*explain)


def test_explain_takes_the_plans_buckets(run: Run) -> None:
    flags = ("alexnet", "--gpus", "8", "--gpus-per-node", "8", "--profile", "cpu")
    found = json.loads(run("search", *flags, "--effort", "normal", "--out", "p.json", "--json"))
    plan = load_plan("p.json")
    assert plan.bucket_bytes < BUCKET_BYTES
    told = json.loads(run("explain", "p.json", next(iter(plan.strategy)), "--json"))
    own = next(form for form in told["forms"] if form["in_plan"])
    assert own["timeline_s"] == found["timeline_s"]


def test_plan_and_explain(run: Run, refuse: Run, here: Path) -> None:
    text = run(*LENET, "--global-batch", "2", "--profile", "p100", "--out", "a.json")
    assert text.rstrip().endswith("plan written to a.json")
    assert [path.name for path in here.iterdir()] == ["a.json"]
    plan = json.loads((here / "a.json").read_text())

    found = json.loads(run("explain", "a.json", "features.0", "--json"))
    rows = found["alternatives"]
    finite(found)
    assert [row["in_plan"] for row in rows].count(True) == 1
    assert [row["step_time_s"] for row in rows] == sorted(row["step_time_s"] for row in rows)
    assert rows[0]["step_time_s"] == pytest.approx(plan["predicted"]["lower_bound_s"])
    assert next(row["config"] for row in rows if row["in_plan"]) == plan["strategy"]["features.0"]
    shown = run("explain", "a.json", "features.0", "--all")
    assert "in the plan" in shown
    assert shown.count("\n") >= len(rows)

    assert "no layer 'feature.0' (did you mean 'features.0'?)" in refuse("explain", "a.json", "feature.0")
    assert "no layer 'x'; it has features.0, features.2" in refuse("explain", "a.json", "x")
    assert "cannot be read" in refuse("explain", "d.json", "features.0")
    assert "required: LAYER" in refuse("explain", "a.json")
    assert "does not fit into" in refuse("explain", "a.json", "features.0", "--search-memory", "1e-9")
    (here / "a.json").write_text((here / "a.json").read_text().replace('"batch": 2', '"batch": 4'))
    assert "was altered" in refuse("explain", "a.json", "features.0")


def test_callables(run: Run, refuse: Run, here: Path) -> None:
    (here / "networks.py").write_text(NETWORKS)
    counts = []
    for name, *flags in (["chatty"], ["listed"], ["alone", "--input-shape", "8"], ["ready", "--input-shape", "8"]):
        found = json.loads(run("search", f"networks:{name}", "--gpus", "2", *flags, "--json"))  # nothing printed beside
        counts.append(len(found["strategy"]))
    assert counts == [2] * 4
    text = run("search", "networks:alone", "--gpus", "2", "--input-shape", "8", "--out", "p.json")
    assert "--model networks:alone" in text
    explain = ("explain", "p.json", "first", "--model", "networks:alone")
    assert json.loads(run(*explain, "--json"))["alternatives"]
    (here / "networks.py").write_text(NETWORKS.replace("8, 16", "8, 24").replace("16, 4", "24, 4") + "# longer")
    sys.modules.pop("networks")
    assert "another model" in refuse(*explain)


GATED = """
import torch
from torch import nn


class Gate(nn.Module):
    def forward(self, x):
        return torch.stack([row * 2 if row.sum() > 0 else row for row in x])


def gated():
    return nn.Sequential(nn.Linear(8, 64), Gate(), nn.Sequential(nn.Linear(64, 4))), (torch.randn(6, 8),)
"""


def test_what_cannot_be_traced_is_refused_and_what_runs_it_is_named(refuse: Run, here: Path) -> None:
    (here / "networks.py").write_text(GATED)
    said = " ".join(refuse("search", "networks:gated", "--gpus", "1", "--batch", "6").split())
    assert "layer '1'" in said
    assert "DistributedDataParallel can run it" in said


def test_a_plan_runs_no_code_that_the_user_does_not_name(run: Run, refuse: Run, here: Path) -> None:
    (here / "networks.py").write_text(NETWORKS)
    run("search", "networks:alone", "--gpus", "1", "--input-shape", "8", "--out", "p.json")
    run("run", "p.json", "--model", "networks:alone", "--data", "synthetic", "--steps", "1")
    sys.modules.pop("networks")
    (here / "networks.py").write_text("open('ran', 'w')")
    for command in (
        ["explain", "p.json", "first"],
        ["run", "p.json", "--steps", "1"],
        ["run", "p.json", "--data", "synthetic"],
    ):
        said = refuse(*command)
        assert "the plan is for 'networks:alone', which is code that a plan may not run" in said
        assert "pass --model networks:alone" in said
    assert not (here / "ran").exists()


PROVENANCE = [
    ("profile", 5, "'profile' cannot be '5'"),
    ("dims", "n", "'dims' cannot be 'n'"),
    ("dims", [["n"]], "'dims' cannot be"),
    ("dims", ["q"], "'dims' cannot be"),
    ("input_shape", ["8"], "'input_shape' cannot be"),
    ("input_shape", [0], "'input_shape' cannot be '[0]'"),
    ("input_shape", 8, "'input_shape' cannot be '8'"),
    ("powers_of_two", "no", "'powers_of_two' cannot be 'no'"),
    ("cost_options", [], "'cost_options' cannot be '[]'"),
    ("cost_options", {"optimizer": ["sgd"]}, "'cost_options' cannot be"),
    ("cost_options", {"optimizer": "magic"}, "unknown optimizer 'magic': choose sgd"),
    ("cost_options", {"dtype": "float3"}, "has the dtype 'float3'"),
    ("cost_options", {"link_model": "x"}, "the plan's provenance: link_model is 'x'; it must be"),
    ("cost_options", {"sync": "x"}, "the plan's provenance: sync is 'x'; it must be"),
    ("cost_options", {"speed": "x"}, "lacks its search's options"),
]


def test_a_plan_whose_provenance_is_unsound(run: Run, refuse: Run, here: Path) -> None:
    run(*MLP, "--out", "p.json")
    plan = json.loads((here / "p.json").read_text())
    del plan["checksum"]
    for key, value, reason in PROVENANCE:
        body = plan | {"provenance": plan["provenance"] | {key: value}}
        (here / "p.json").write_text(json.dumps(body | {"checksum": checksum(body)}))
        with case(key, value):
            assert reason in refuse("explain", "p.json", "0")


def test_export(run: Run, here: Path) -> None:
    assert "cost tables written to m.cfn" in run(*MLP, "--export-costs", "m.cfn")
    problem = json.loads((here / "m.cfn").read_text())
    assert set(problem) == {"problem", "variables", "functions"}


def test_a_plan_for_answers(run: Run, refuse: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["lenet5", "--gpus", "2", "--gpus-per-node", "2"]
    training = json.loads(run("search", *flags, "--json"))
    found = json.loads(run("search", *flags, "--json", "--inference", "--out", "plan.json"))
    assert found["optimal"]
    assert found["baselines"]["data"]["timeline_s"] < training["baselines"]["data"]["timeline_s"]
    plan = load_plan("plan.json")
    assert plan.provenance["cost_options"]["kind"] == "inference"
    assert plan.predicted["sync_bytes"] == plan.predicted["backward_s"] == 0
    assert "inference" in run("search", *flags, "--inference")
    assert run("explain", "plan.json", next(iter(plan.strategy)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "layerwise.run trains" in refuse("run", "plan.json")
