"""A script of two ranks that makes models parallel, and says what of the process is other than it was before."""

import hashlib
import logging
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.tensor  # which says so to optimizers, whoever imports it
from torch import nn
from torch.nn.modules import module as every_module
from torch.optim import optimizer as every_optimizer

import layerwise


def state() -> dict[str, object]:
    """What the process has, by name. SIGTERM is the watch's, where nobody has a handler (`layerwise.comm.watch`)."""
    cuda, cudnn, hooks = torch.backends.cuda.matmul, torch.backends.cudnn, vars(every_module)
    loggers = {name: logger for name, logger in logging.root.manager.loggerDict.items() if hasattr(logger, "handlers")}
    return {
        "filters of warnings": list(warnings.filters),
        "gradient mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "default type": (torch.get_default_dtype(), torch.get_default_device()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.get_deterministic_debug_mode()),
        "backends": (
            cuda.allow_tf32,
            cudnn.allow_tf32,
            cudnn.benchmark,
            cudnn.deterministic,
            torch.backends.mkldnn.enabled,
        ),
        "precision of matmul": torch.get_float32_matmul_precision(),
        "hooks of all modules": [len(hooks[name]) for name in hooks if name.startswith("_global_") and "hooks" in name],
        "hooks of all optimizers": [len(v) for k, v in vars(every_optimizer).items() if k.startswith("_global_optim")],
        "types of foreach": list(every_optimizer._foreach_supported_types),
        "random numbers": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "random numbers of Python": hash(random.getstate()),
        "random numbers of NumPy": np.random.get_state()[1].tolist(),
        "signals": {s: signal.getsignal(s) for s in signal.valid_signals() if s != signal.SIGTERM},
        "environment": dict(os.environ),
        "logging": (logging.root.level, logging.root.manager.disable, len(logging.root.handlers)),
        "loggers": {name: one.level for name, one in loggers.items()},
        "hooks of errors": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook),
        "output": (sys.stdout, sys.stderr),
        "recursion": sys.getrecursionlimit(),
        "folder": Path.cwd(),
        "tracing": (sys.gettrace(), sys.getprofile()),
    }


def apart(before: object, now: object) -> str:
    """What is only in one of them."""
    if isinstance(before, dict) and isinstance(now, dict):
        return str({key: (before.get(key), now.get(key)) for key in before | now if before.get(key) != now.get(key)})
    if isinstance(before, list) and isinstance(now, list):
        return f"gone {[one for one in before if one not in now]}, new {[one for one in now if one not in before]}"
    return f"{before} -> {now}"


def main() -> None:
    """Prints what has changed, by rank and strategy."""
    dist.init_process_group("gloo")
    before, told = state(), []
    for strategy in ("data", {"0": {"c": 2}, "3": {"n": 2}}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10))
        before |= {name: value for name, value in state().items() if name == "random numbers"}
        options = layerwise.ParallelOptions(measure_s=0.2, verbose=False)  # of the layers that are left to be searched
        layerwise.parallelize(model, torch.zeros(4, 3, 4, 4), strategy=strategy, options=options)
        now = state()
        known = before["loggers"]
        assert isinstance(known, dict)
        now["loggers"] = {name: value for name, value in now["loggers"].items() if name in known}  # type: ignore[attr-defined]
        told += [f"{name}: {apart(before[name], now[name])}" for name in before if before[name] != now[name]]
    print("\n".join(told) or "as it was", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
