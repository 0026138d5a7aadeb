"""What the ranks of a pool (tests/comm/pool.py) make of exported plans."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from layerwise.comm.base import Comm


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(4, 4)]
    return nn.Sequential(*layers).double()


def numbers(model: nn.Module, *inputs: Tensor, **named: Tensor) -> tuple[float, dict[str, Tensor]]:
    """A loss, and its gradients."""
    out = model(*inputs, **named)
    loss = (out if isinstance(out, Tensor) else out.logits).square().mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def by_torch(comm: Comm, text: str, x: Tensor) -> Any:
    said: dict[str, Any] = {}
    exec(text, said)
    return numbers(parallelize_module(network(), init_device_mesh("cpu", (comm.size,)), said["PLAN"]), x)


def by_transformers(comm: Comm, folder: str, rules: dict[str, str], ids: Tensor) -> Any:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=comm.size, tp_plan=rules)
    return numbers(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64, distributed_config=config), ids)


def by_deepspeed(comm: Comm, section: dict[str, Any], x: Tensor) -> list[float]:
    """Losses of two steps. section: {} for PyTorch alone."""
    model: Any = network().float()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    if section:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
        sgd = {"type": "SGD", "params": {"lr": 0.1}}  # made of the split parameters
        config = {"train_micro_batch_size_per_gpu": len(x), "optimizer": sgd, "gradient_clipping": 0.0, **section}
        model, *_ = deepspeed.initialize(model=model, config=config)
    losses = []
    for _ in range(2):
        loss = model(x).square().mean()
        losses.append(loss.item())
        model.backward(loss) if section else loss.backward()
        (model if section else optimizer).step()
    return losses
