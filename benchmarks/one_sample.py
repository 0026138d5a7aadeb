"""python -m benchmarks.one_sample: one sample on four ranks (gloo, this machine), by layerwise and by others.

2-D, 3-D: convolutions of the kinds that the others say they take (stride 1 where padded, else stride = kernel), split
along the last dimension by each. Against one device, in float32: the largest relative difference of the output and of
the gradients; CPU time of a step (forward and backward) on the slowest rank, over that of one device in the same run.

--others FOLDER: what others need, in a folder of its own, since their needs would replace the environment's:
    pip install --no-deps --target FOLDER nvidia-physicsnemo warp-lang tensordict NEEDS...
--distconv CHECKOUT: of github.com/LBANN/DistConv, which needs torch alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import subprocess
import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import layerwise

RANKS, STEPS = 4, 7
SIDES = {2: (512, 512), 3: (32, 32, 64)}


class Scored(nn.Module):
    """Returns a loss and the output that it is of."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv = {2: nn.Conv2d, 3: nn.Conv3d}[dims]
        first, second, half = conv(2, 16, 3, padding=1), conv(16, 16, 3, padding=1), conv(16, 32, 2, stride=2)
        last = conv(32, 32, 3, padding=1), nn.ReLU(), conv(32, 4, 1)
        self.layers = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), half, nn.ReLU(), *last)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layers(x)
        return (out - 0.3).square().mean(), out


def split(way: str, model: Scored, x: Tensor):
    """The module, what it is called with, and the box of the output that it returns."""
    if way == "layerwise":
        options = layerwise.ParallelOptions(profile="cpu", io="boxes", measure_s=0, verbose=False)
        strategy = {f"layers.{i}": {"w": RANKS} for i in (0, 2, 4, 6, 8)}
        module = layerwise.parallelize(model, (x,), strategy=strategy, options=options)
        (read,) = module.read_boxes().values()
        return module, x[read.slices()], module.output_boxes()[1].slices()
    if way == "DistConv":
        from distconv import DCTensor, DistConvDDP, ParallelStrategy

        cut = ParallelStrategy(num_shards=RANKS, shard_dim=x.dim() - 1, device_type="cpu")
        convolutions = DistConvDDP(model.layers, parallel_strategy=cut)
        model.forward = lambda x: (((out := convolutions(x).to_replicate()) - 0.3).square().mean(), out)
        return model, DCTensor.distribute(x, cut), ()
    mesh = init_device_mesh("cpu", (RANKS,))
    if way == "ShardTensor":
        from physicsnemo.domain_parallel import ShardTensor, register_custom_ops

        register_custom_ops()  # as it does itself where there is a GPU
        local = x.chunk(RANKS, -1)[dist.get_rank()].contiguous()
        return model, ShardTensor.from_local(local, mesh, (Shard(x.dim() - 1),)), ()
    if way == "tensor parallel":
        return parallelize_module(model, mesh, {"layers.2": ColwiseParallel()}), x, ()
    return distribute_module(model, mesh), distribute_tensor(x, mesh, [Shard(x.dim() - 1)]), ()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach() if hasattr(tensor, "full_tensor") else tensor.detach()


def away(measured: Tensor, wanted: Tensor) -> float:
    return float((full(measured) - full(wanted)).abs().max() / wanted.abs().max())


def trial(way: str, dims: int) -> dict[str, float]:
    """Differences of a way, and its time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    single, x = Scored(dims), torch.randn(1, 2, *SIDES[dims])
    module, local, box = split(way, copy.deepcopy(single), x)
    times = []
    for _ in range(STEPS):
        for model, given in ((single, x), (module, local)):
            model.zero_grad()
            dist.barrier()
            began = time.process_time()
            loss, out = model(given)
            loss.backward()
            times.append(time.process_time() - began)
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    result = {
        "output": away(out, single(x)[1][box]),
        "gradients": max(away(grads[name], parameter.grad) for name, parameter in single.named_parameters()),
    }
    seconds = torch.tensor(times)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # the slowest rank's
    return result | {"time": median(seconds[1::2].tolist()) / median(seconds[::2].tolist())}


def main() -> None:
    """Print a line for each network and way; a way that raises says what."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--distconv", metavar="CHECKOUT", help="run DistConv, too")
    parser.add_argument("--others", metavar="FOLDER", help="run ShardTensor, too")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        dist.init_process_group("gloo")
        try:
            print(json.dumps(trial(args.rank[0], int(args.rank[1]))), flush=True)
        except Exception as error:  # of any library: it is the result
            print(json.dumps({"raises": f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"}), flush=True)
            os._exit(1)  # torchrun ends the other ranks
        return
    python = os.pathsep.join(filter(None, [args.distconv, os.environ.get("PYTHONPATH"), args.others]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": python}
    ways = ["layerwise", "DTensor", "tensor parallel"]
    ways += ["DistConv"] * bool(args.distconv) + ["ShardTensor"] * bool(args.others)
    for dims in SIDES:
        for way in ways:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
            command += ["-m", "benchmarks.one_sample", "--rank", way, str(dims)]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
            ranks = [json.loads(line) for line in re.findall(r"\{.*?\}", done.stdout)]
            worst = next((rank for rank in ranks if "raises" in rank), None) or {
                key: f"{max(rank[key] for rank in ranks):.2g}" for key in ranks[0]
            }
            print(f"{dims}-D", way, *(f"{key} {value}" for key, value in worst.items()), flush=True)


if __name__ == "__main__":
    main()
