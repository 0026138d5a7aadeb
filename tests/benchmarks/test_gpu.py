"""benchmarks.gpu: what fails is kept as a line beside the rest, and what is there is not taken again."""

import time
from pathlib import Path

import pytest

from benchmarks.gpu.rows import Results, Setting, Workers

ROWS = "tests.benchmarks.gpu_rows:rows"


def test_a_row_that_fails_leaves_the_others_alone_and_a_second_call_goes_on(tmp_path: Path) -> None:
    setting = Setting("cpu", True, str(tmp_path))
    path = tmp_path / "results.jsonl"
    assert Workers(Results(path, setting), time.monotonic()).run("stage", ROWS) == [
        "raises",
        "ends",
        "hangs",
        "is well",
    ]
    assert Workers(Results(path, setting), time.monotonic() + 300).run("stage", ROWS) == []
    with path.open("a") as file:
        file.write('{"stage": "cut of')  # a call was killed as it wrote
    results = Results(path, setting)
    found = {name: row.get("error", row["told"]) for (_, name), row in results.rows.items()}
    assert found == {
        "raises": "RuntimeError: CUDA error: an illegal memory access … Compile with TORCH_USE_CUDA_DSA",
        "ends": "its process ended with 3",
        "hangs": "took more than 6 s",
        "is well": "fine",
    }
    Workers(results, time.monotonic() + 300).run("stage", ROWS)
    assert Results(path, setting).rows["stage", "is well"]["pid"] == results.rows["stage", "is well"]["pid"]
    with pytest.raises(SystemExit, match="another --out"):
        Results(path, Setting("cuda", True, str(tmp_path)))
