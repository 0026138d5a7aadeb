"""A loop of Accelerate's. Needs: pip install layerwise[huggingface]

python examples/train_accelerate.py
torchrun --nproc-per-node 2 examples/train_accelerate.py
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import layerwise
from layerwise.integrations.accelerate import prepare


def main(epochs: int, measure_s: float) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x = torch.randn(512, 64)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), 64 // accelerator.num_processes)
    options = layerwise.ParallelOptions(measure_s=measure_s)
    model, optimizer, loader = prepare(  # was: accelerator.prepare(model, optimizer, loader)
        accelerator, model, optimizer, loader, options=options
    )
    for epoch in range(epochs):
        for inputs, target in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), target)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--measure-s", type=float, default=0.0, help="seconds to measure this machine; 30 for real work"
    )
    main(**vars(parser.parse_args()))
