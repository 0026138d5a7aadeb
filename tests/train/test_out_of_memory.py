"""Errors of too little memory say what to do; others are left as they are."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from layerwise.errors import LayerwiseError
from layerwise.train.session import enough_memory
from tests.run.small_plans import plan

PLAN = plan("mlp:4x3x2", 8, 2)


def fails(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    "act",
    [lambda: fails(MemoryError()), lambda: torch.empty(2**60), lambda: fails(torch.OutOfMemoryError("CUDA: 3 GiB"))],
    ids=["Python", "CPU", "GPU"],
)
def test_out_of_memory_says_what_to_do(act: Callable[[], object]) -> None:
    reason = r"^rank 1 ran out of memory \(the plan predicts 3 GB.*: search for more GPUs, a smaller batch"
    with pytest.raises(LayerwiseError, match=reason), enough_memory(replace(PLAN, predicted={"memory_bytes": 3e9}), 1):
        act()
    with pytest.raises(LayerwiseError, match=r"^rank 0 ran out of memory: search for more"), enough_memory(PLAN, 0):
        act()


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("another"), LayerwiseError("a mistake")], ids=repr)
def test_other_errors_are_left_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, enough_memory(PLAN, 0):
        fails(error)
    assert raised.value is error
