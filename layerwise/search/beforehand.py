"""Plans for the devices that a failure leaves, searched beside a training, so that a restart has them in the cache."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from layerwise.errors import LayerwiseError
from layerwise.plan import load_plan
from layerwise.search.rebuild import replan


def left(gpus: int, each: int) -> list[int]:
    """The devices that are left when one fails, and its node of `each` with it; and when half of all do."""
    node = each if each < gpus and gpus % each == 0 else 1
    return sorted({gpus - node, gpus // node // 2 * node} - {0}, reverse=True)


@contextmanager
def searching(
    plan: str, gpus: int, each: int, model: str | None, profile: str | None
) -> Iterator[subprocess.Popen[bytes]]:
    """Within it a process of the lowest priority searches as `replan` does, for `left(gpus, each)`."""
    command = [sys.executable, "-W", "ignore", "-m", __name__, plan, str(gpus), str(each), model or "", profile or ""]
    variables = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }  # one core, and none of the training's memory
    null = subprocess.DEVNULL
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=null, stderr=null) as process:
        try:
            yield process
        finally:
            process.kill()


def main(argv: Sequence[str]) -> None:
    """The process: PLAN GPUS GPUS_PER_NODE MODEL PROFILE, of which the last two may be empty."""
    os.nice(19)
    with suppress(OSError):  # where memory is short, this goes first
        Path("/proc/self/oom_score_adj").write_text("1000")
    path, gpus, each, model, profile = argv
    plan = load_plan(path)
    for number in left(int(gpus), int(each)):
        if number != plan.gpus:
            with suppress(LayerwiseError):  # a restart will say it
                per_node = min(int(each), number)
                replan(plan, number, per_node, model=model or None, profile=profile or None)


def _end_with_stdin() -> None:
    """The training has been killed."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    main(sys.argv[1:])
