"""Grey and white matter of a brain by a 3-D U-Net: every rank reads the boxes of the crops that it needs (torchrun)."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from layerwise.models import find

import layerwise
from layerwise import checkpoint
from layerwise.cli import run_main
from layerwise.examples.brain import CLASSES, Brain, parted, read_brain


class Segmentation(torch.nn.Module):
    """The loss of a batch, and the Dice of each class."""

    def __init__(self) -> None:
        super().__init__()
        self.network = find("unet3d").build(width=0.125, num_classes=len(CLASSES))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.network(x)
        p, t, axes = logits.softmax(1), F.one_hot(target, len(CLASSES)).movedim(-1, 1), (2, 3, 4)
        dice = 2 * (p * t).sum(axes) / (p + t).sum(axes)
        return F.cross_entropy(logits, target) + 1 - dice.mean(), *dice.mean(0).unbind()


def main(steps: int, extent: int, batch: int, bf16: bool, folder: str | None) -> None:
    torch.manual_seed(0)
    x = torch.empty(batch, 1, extent, extent, extent, device="meta")  # of all ranks together, in nobody's memory
    autocast, boxes = torch.bfloat16 if bf16 else None, layerwise.ParallelOptions(io="boxes", measure_s=0)
    model = layerwise.parallelize(Segmentation(), (x, x[:, 0].long()), autocast=autocast, options=boxes)
    mixed = torch.autocast(model.device.type, torch.bfloat16, enabled=bf16)
    print(f"rank {model.comm.rank} reads {model.read_boxes()['x'].shape} of {tuple(x.shape)}")
    train, held_out = parted(read_brain(), extent)

    def crops(brain: Brain, count: int) -> layerwise.BoxLoader:
        sources = [np.broadcast_to(a, (count, *a.shape)) for a in brain]
        return layerwise.BoxLoader(model, *sources, crop="random", flip="dhw")

    optimizer, loader = torch.optim.Adam(model.parameters(), lr=3e-3), crops(train, steps * batch)
    if folder and checkpoint.resume(folder, model, optimizer, {}):  # of any number of ranks
        loader.set_epoch(0, done=model.steps_done)
    for inputs in loader:
        optimizer.zero_grad()
        with mixed:
            loss, *_ = model(*inputs)
        loss.backward()
        optimizer.step()
        if model.comm.rank == 0:
            print(f"step {model.steps_done}: loss {loss.item():.4f}", flush=True)
    if folder:
        checkpoint.save(folder, model, optimizer, {})
    with torch.no_grad(), mixed:
        dice = torch.stack([torch.stack(model(*inputs)[1:]) for inputs in crops(held_out, 4 * batch)]).mean(0)
    if model.comm.rank == 0:
        print("held out: " + ", ".join(f"{name} {d:.3f}" for name, d in zip(CLASSES, dice.tolist(), strict=True)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8, help="in all, those before a checkpoint included")
    parser.add_argument("--extent", type=int, default=32, choices=range(16, 129, 16), help="of a crop, in voxels")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument("--checkpoint", dest="folder", help="go on from there, if there is one, and save there")
    raise SystemExit(run_main(lambda _: main(**vars(parser.parse_args()))))
