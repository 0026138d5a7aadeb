"""Trains a small network on handwritten digits: in parallel, with layerwise's loop instead of its own.

torchrun --nproc-per-node 2 --local-ranks-filter 0 fit.py mnist 64 model.pt      # 64 samples in all
"""

import sys

import torch
from torch import nn

import layerwise
from benchmarks.usability.images import images

EPOCHS = 4


def main(data: str, batch: int, file: str) -> None:
    torch.manual_seed(0)
    train, test = images(data)
    side = train[0][0].shape[-1] // 4
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * side * side, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    loss = nn.functional.cross_entropy
    layerwise.fit(model, train, loss, optimizer, batch=batch, scheduler=schedule, epochs=EPOCHS, held_out=test)
    layerwise.save(model, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
