"""python -m benchmarks.ends: a script of two ranks ends cleanly, however often: exit code 0, and nothing on stderr.

Each job: a small 3-D U-Net, a batch of one volume, a DataLoader with a worker. It once ended with SIGABRT after right
results ("terminate called without an active exception": a thread that outlived the interpreter).
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections import Counter

RANKS, LIMIT_S = 2, 180.0


def job() -> None:
    """What a rank does, as a user would write it."""
    import torch
    from layerwise.models.unet3d import UNet3d
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset

    import layerwise

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(3, 1, 16, 16, 16), torch.randint(0, 3, (3, 16, 16, 16)))
    options = layerwise.ParallelOptions(measure_s=0, effort="quick")
    loader = DataLoader(data, batch_size=1, num_workers=1)
    model, loader = layerwise.parallelize(UNet3d(1 / 16), loader, verbose=False, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def end() -> str:
    """How a job ended: "clean", or exit codes and stderr of its ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_all = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.ends", "--job"]
    each = [{**os.environ, **of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]
    ranks = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for environment in each]
    said = [rank.communicate(timeout=LIMIT_S)[1].strip() for rank in ranks]
    ends = [f"rank {i}: exit {one.returncode}; {text}" for i, (one, text) in enumerate(zip(ranks, said, strict=True))]
    return "clean" if ends == [f"rank {i}: exit 0; " for i in range(RANKS)] else "\n".join(ends)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ends", type=int, default=200)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.job:
        sys.exit(job())
    ends = Counter(end() for _ in range(asked.ends))
    print("\n".join(f"{count} × {how}" for how, count in ends.most_common()))
    sys.exit(ends.keys() != {"clean"})
