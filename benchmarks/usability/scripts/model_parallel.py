"""Trains a small network on handwritten digits: model parallelism by hand, as Megatron-LM's.

    torchrun --nproc-per-node 2 --local-ranks-filter 0 model_parallel.py mnist 64 model.pt    # 64 samples in all

Layers go in pairs: the first of a pair is split by outputs, the second by inputs, and its partial sums are added up.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.usability.images import images

EPOCHS = 4


class Copy(torch.autograd.Function):
    """What every rank has: forward as it is; backward, every rank's gradient is added up."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    """Partial sums: forward, they are added up; backward as it is."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def shard(tensor, dim):
    """This rank's part of a parameter."""
    world = dist.get_world_size()
    if tensor.shape[dim] % world:
        raise ValueError(f"{tensor.shape[dim]} channels cannot be split evenly over {world} ranks")
    return nn.Parameter(tensor.detach().chunk(world, dim)[dist.get_rank()].clone())


def whole(part, dim):
    """The parameter whose parts the ranks have."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach().contiguous())
    return torch.cat(parts, dim)


class ByOutputs(nn.Module):
    """A linear layer or convolution of which each rank computes some output channels."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        layer.weight, layer.bias = shard(layer.weight, 0), shard(layer.bias, 0)

    def forward(self, x):
        return self.layer(Copy.apply(x))

    def whole_state(self):
        return {"weight": whole(self.layer.weight, 0), "bias": whole(self.layer.bias, 0)}


class ByInputs(nn.Module):
    """A linear layer or convolution to which each rank brings some input channels."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.bias = layer, layer.bias
        layer.weight, layer.bias = shard(layer.weight, 1), None

    def forward(self, x):
        x = Sum.apply(self.layer(x))
        return x + self.bias.view(-1, *[1] * (x.dim() - 2))

    def whole_state(self):
        return {"weight": whole(self.layer.weight, 1), "bias": self.bias.detach()}


def main(data: str, batch: int, file: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, test = images(data)
    side = train[0][0].shape[-1] // 4
    model = nn.Sequential(
        ByOutputs(nn.Conv2d(1, 8, 3, stride=2, padding=1)),
        nn.ReLU(),
        ByInputs(nn.Conv2d(8, 16, 3, stride=2, padding=1)),
        nn.ReLU(),
        nn.Flatten(),
        ByOutputs(nn.Linear(16 * side * side, 128)),
        nn.ReLU(),
        ByInputs(nn.Linear(128, 10)),
    )
    loader = DataLoader(train, batch, shuffle=True)
    test_loader = DataLoader(test, batch)
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
    split = {name: layer for name, layer in model.named_children() if isinstance(layer, ByOutputs | ByInputs)}
    state = {f"{name}.{key}": value for name, layer in split.items() for key, value in layer.whole_state().items()}
    if dist.get_rank() == 0:
        torch.save(state, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
