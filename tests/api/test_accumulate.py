"""sync_every: the user's loop as it is makes the steps of a batch k times as large."""

import pytest
import torch
from torch import nn

import layerwise
from layerwise.errors import LayerwiseError
from tests.api.ranks import smooth
from tests.api.script import BATCH, data
from tests.api.test_parallelize import apart
from tests.comm.pool import run_ranks

pytestmark = pytest.mark.usefixtures("models_traced_once")


def test_every_second_step_is_that_of_twice_the_batch() -> None:
    model = smooth()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = data(4 * BATCH).tensors
    for start in range(0, 4 * BATCH, 2 * BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[start : start + 2 * BATCH]), y[start : start + 2 * BATCH]).backward()
        optimizer.step()
    for changed, state in run_ranks(2, "tests.api.ranks:accumulated", 2):
        assert changed == [False, True, False, True]
        assert apart(state, model.state_dict()) <= 1e-9


def test_only_for_data_parallelism() -> None:
    for message in run_ranks(2, "tests.api.ranks:refused", {"strategy": "model", "sync_every": 2}):
        assert "is for data parallelism, but the plan splits c" in message
    for wrong in (0, "auto", 1.5):
        with pytest.raises(LayerwiseError, match="it must be at least 1, and a whole number"):
            layerwise.parallelize(smooth(), data().tensors[0][:4], options=layerwise.ParallelOptions(sync_every=wrong))
