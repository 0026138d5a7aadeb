"""A DataLoader's workers: what a job's manager sends them, and how their rank still ends them."""

import multiprocessing
import os
import signal
import time

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from layerwise.checkpoint.signals import WorkerStart

STARTED = []


class Signalled(Dataset[Tensor]):
    """Sends its worker both signals with every sample, of which the last never comes."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Tensor:
        assert get_worker_info() is not None
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        time.sleep(60 if i == 7 else 0.05)
        return torch.tensor([i, *STARTED])


def test_only_its_rank_ends_a_worker() -> None:
    """Also one that is busy; the user's worker_init_fn is called."""
    loader = DataLoader(Signalled(), 1, num_workers=2, worker_init_fn=WorkerStart(STARTED.append))
    before = multiprocessing.active_children()  # ranks of other tests
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(7)] == [[[i, i % 2]] for i in range(7)]
    workers = [child for child in multiprocessing.active_children() if child not in before]
    for worker in workers:
        worker.terminate()
        worker.join(5)
    assert [worker.exitcode for worker in workers] == [0, 0], workers
