"""A language model of Hugging Face's, small and with random weights. Its loss is inside the model.

python examples/hf.py                                  # needs: pip install transformers
torchrun --nproc-per-node 2 examples/hf.py
"""

import argparse
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import layerwise


def main(steps: int, measure_s: float) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False)
    model = GPT2LMHeadModel(config)
    ids = torch.randint(128, (8, 16))[rank::world]  # this rank's texts
    batch = {"input_ids": ids, "labels": ids}
    model = layerwise.parallelize(model, batch, options=layerwise.ParallelOptions(measure_s=measure_s))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss of its own texts {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--measure-s", type=float, default=0.0, help="seconds to measure this machine; 30 for real work"
    )
    main(**vars(parser.parse_args()))
