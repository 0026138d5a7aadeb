"""The plans and flags that the tests of `layerwise run` have in common, and its result as JSON."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.run.small_plans import plan

MLP = "mlp:64x12x10"
RESULT = {
    "model", "io", "world_size", "steps", "losses", "accuracy", "dice", "held_out_loss", "step_time_s",
    "peak_resident_bytes", "bytes_sent", "bytes_predicted", "compare",
}  # fmt: skip
PREDICTED = {"transfer_bytes": 2 * 2 * 4 * (4 * 12 + 4 * 5), "sync_bytes": 2 * 4 * 12 * 65, "statistics_bytes": 0}


def save_plans(folder: Path) -> None:
    """Of one rank and of two."""
    one, two = plan(MLP, 8, 1), plan(MLP, 8, 2, {"0": {"n": 2}, "2": {"c": 2}})
    one.save(folder / "one.json")
    replace(one, provenance={"cost_options": {"local_batch_norm": True}}).save(folder / "local.json")
    replace(two, predicted=PREDICTED).save(folder / "two.json")
    plan(MLP, 8, 2, {"0": {"c": 2}, "2": {"c": 2}}, "free").save(folder / "free.json")


def environment() -> dict[str, str]:
    """Of a process of its own."""
    root = str(Path(__file__).parents[2])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root, "PYTHONUNBUFFERED": "1"}


def strict(text: str) -> Any:
    """JSON without NaN."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
