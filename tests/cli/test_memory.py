"""The command line under memory limits: what it takes, writes, says and refuses."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import MLP, Run

WIDE = (
    "search",
    "mlp:64x512x512x8",
    "--gpus",
    "2",
    "--profile",
    "pcie",
    "--global-batch",
    "256",
    "--optimizer",
    "adam",
)


def free_bytes(run: Run) -> float:
    return float(json.loads(run(*WIDE, "--json"))["memory_bytes"])


def test_a_plan_within_a_limit(run: Run, here: Path) -> None:
    limit = int(0.6 * free_bytes(run))
    flags = (*WIDE, "--memory-limit", str(limit), "--out", "p.json")
    found = json.loads(run(*flags, "--memory", "--json"))
    assert found["memory_limit_bytes"] == limit
    assert found["fits"]
    assert found["memory_bytes"] <= limit < found["without_limit"]["memory_bytes"]
    assert found["least_memory_bytes"] is None
    assert sum(found["memory_by_kind"]["data"].values()) == pytest.approx(found["baselines"]["data"]["memory_bytes"])
    assert {(type(row["recompute"]), row["states"]) for row in found["layers"].values()} > set()
    provenance = json.loads((here / "p.json").read_text())["provenance"]
    assert provenance["memory_limit_bytes"] == limit
    assert provenance["offer"] == ["recompute", "shard"]
    assert provenance["without_limit"]["memory_bytes"] == found["without_limit"]["memory_bytes"]

    layer = next(iter(found["strategy"]))
    told = json.loads(run("explain", "p.json", layer, "--json"))
    assert told["memory_limit_bytes"] == limit
    assert told["memory_prices"] == found["memory_prices"]
    assert [form["in_plan"] for form in told["forms"]].count(True) == 1
    own = next(form for form in told["forms"] if form["in_plan"])
    assert own["memory_bytes"] == found["memory_bytes"]
    assert own["timeline_s"] == found["timeline_s"]
    shown = run("explain", "p.json", layer)
    assert "The plan was found under a limit of" in shown
    assert "the plan with this layer" in shown


def test_what_is_not_offered_is_not_chosen(run: Run) -> None:
    limit = str(0.65 * free_bytes(run))
    found = json.loads(run(*WIDE, "--memory-limit", limit, "--offer", "none", "--json"))
    assert {(row["recompute"], row["states"]) for row in found["layers"].values()} == {(False, "replicated")}
    found = json.loads(run(*WIDE, "--memory-limit", limit, "--offer", "shard", "--json"))
    assert not any(row["recompute"] for row in found["layers"].values())


def test_a_limit_below_the_least_is_refused(run: Run, refuse: Run, here: Path) -> None:
    asked = (*MLP, "--memory-limit", "1kB", "--out", "p.json", "--export-costs", "c.cfn")
    for flags in (asked, (*asked, "--json")):
        said = refuse(*flags)
        assert "--memory-limit 1kB: no plan fits into the 1.00 kB of a device: the smallest plan found needs" in said
        assert "(proven). No change that was tried makes one fit" in said
        assert not list(here.iterdir())


def test_where_nothing_fits_a_device_it_warns_and_says_what_would(run: Run, here: Path) -> None:
    huge = ("search", "mlp:100000x100000x8", "--gpus", "2", "--profile", "p100")
    text = run(*huge, "--out", "p.json")
    assert "WARNING: no plan fits into the 14.5 GB of a device: every plan needs at least" in text
    assert json.loads((here / "p.json").read_text())["provenance"]["fits"] is False
    found = json.loads(run(*huge, "--json"))
    assert found["fits"] is False
    assert found["least_memory_bytes"] > found["memory_limit_bytes"]
    assert {remedy["what"] for remedy in found["remedies"]} >= {"4 GPUs"}


def test_a_priced_strategy_is_held_against_the_limit(run: Run, here: Path) -> None:
    strategy = json.loads(run(*MLP, "--json"))["strategy"]
    (here / "s.json").write_text(json.dumps(strategy))
    priced = [json.loads(run(*MLP, "--price", "s.json", "--memory-limit", m, "--json")) for m in ("1kB", "1GB")]
    assert [p["fits"] for p in priced] == [False, True]
    assert "memory of the fullest device" in run(*MLP, "--price", "s.json", "--memory")
    assert "(too much)" in run(*MLP, "--price", "grid:2x2", "--memory-limit", "1kB")
    assert "(too much)" not in run(*MLP, "--price", "grid:2x2")


def test_a_plan_is_drawn(run: Run) -> None:
    assert "picture written to plan.svg" in run(*MLP, "--plot", "plan.svg")
    assert "picture written to priced.svg" in run(*MLP, "--price", "data", "--plot", "priced.svg")
    for name in ("plan.svg", "priced.svg"):
        picture = Path(name).read_text(encoding="utf-8")
        assert picture.startswith("<svg")
        assert "device 3</text>" in picture
