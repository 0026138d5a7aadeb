"""Trains a small network on handwritten digits: in parallel with one call of layerwise.

torchrun --nproc-per-node 2 --local-ranks-filter 0 one_call.py mnist 64 model.pt      # 64 samples in all
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

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
    loader = DataLoader(train, batch, shuffle=True)
    test_loader = DataLoader(test, batch)
    model = layerwise.parallelize(model, loader)
    loader = layerwise.split(loader, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        schedule.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    model.eval()
    right = torch.tensor(0)
    with torch.no_grad():
        for x, y in test_loader:
            right += (model(x).argmax(1) == y).sum()
    print(f"held out: {right.item() / len(test):.2%} right")
    layerwise.save(model, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
