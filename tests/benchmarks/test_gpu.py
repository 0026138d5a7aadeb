"""benchmarks.gpu: what fails is kept as a line beside the rest, and what is there is not taken again."""

import time
from pathlib import Path

import pytest

from benchmarks.gpu import rows
from benchmarks.gpu.rows import Results, Setting
from tests.comm.pool import context

ROWS = "tests.benchmarks.gpu_rows:rows"


def test_a_row_that_fails_leaves_the_others_alone_and_a_second_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "get_context", lambda _: context())  # forked from where PyTorch is imported
    setting = Setting("cpu", True, str(tmp_path))
    path = tmp_path / "results.jsonl"
    assert Results(setting).take("stage", ROWS, time.monotonic()) == ["raises", "ends", "hangs", "is well"]
    assert Results(setting).take("stage", ROWS, time.monotonic() + 300) == []
    with path.open("a") as file:
        file.write('{"stage": "cut of')  # a call was killed as it wrote
    results = Results(setting)
    found = {name: row.get("error", row["told"]) for (_, name), row in results.rows.items()}
    assert found == {
        "raises": "RuntimeError: CUDA error: an illegal memory access … Compile with TORCH_USE_CUDA_DSA",
        "ends": "its process ended with 3",
        "hangs": "took more than 3 s",
        "is well": "fine",
    }
    results.take("stage", ROWS, time.monotonic() + 300)
    assert Results(setting).rows["stage", "is well"]["pid"] == results.rows["stage", "is well"]["pid"]
    assert list(Results(setting, again=True).rows) == [("stage", "is well")]
    with pytest.raises(SystemExit, match="another --out"):
        Results(Setting("cuda", True, str(tmp_path)))
