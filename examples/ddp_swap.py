"""A DistributedDataParallel script with one line swapped. Each rank feeds its own samples, as with DDP.

python examples/ddp_swap.py
torchrun --nproc-per-node 2 examples/ddp_swap.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import layerwise


def main(steps: int, measure_s: float) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group()
    torch.manual_seed(0)
    x = torch.randn(512, 64)
    data = TensorDataset(x, x[:, :10].argmax(1))
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, 64 // world, sampler=sampler, drop_last=True)
    model: nn.Module = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    example = next(iter(loader))[0]  # what one rank calls the model with
    model = layerwise.parallelize(
        model, example, options=layerwise.ParallelOptions(measure_s=measure_s)
    )  # was: DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: loss {total.item() / world:.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--measure-s", type=float, default=0.0, help="seconds to measure this machine; 30 for real work"
    )
    main(**vars(parser.parse_args()))
