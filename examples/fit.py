"""Training without a loop of your own; the numbers do not depend on the number of ranks.

python examples/fit.py
torchrun --nproc-per-node 2 --local-ranks-filter 0 examples/fit.py
"""

import argparse

import torch
from torch import nn

import layerwise


def main(epochs: int, measure_s: float, out: str | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(640, 1, 8, 8)
    y = (x.mean((1, 2, 3)) > 0).long()
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 2),
    )
    layerwise.fit(
        model,
        (x[:512], y[:512]),
        nn.CrossEntropyLoss(),
        "adam",
        epochs=epochs,
        batch=64,
        held_out=(x[512:], y[512:]),
        options=layerwise.ParallelOptions(measure_s=measure_s),
    )
    if out is not None:
        layerwise.save(model, out)  # the whole model's state dict, whatever the plan


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--measure-s", type=float, default=0.0, help="seconds to measure this machine; 30 for real work"
    )
    parser.add_argument("--out", metavar="FILE.pt", help="where the trained weights go")
    main(**vars(parser.parse_args()))
