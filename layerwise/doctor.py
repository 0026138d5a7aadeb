"""layerwise doctor: what is installed, devices, backends, permissions, and a self-test of two ranks."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from layerwise.cli import Parser, command, output_arguments, positive, present, run_main
from layerwise.machine.catalogue import reported
from layerwise.machine.profiles import folder
from layerwise.quantities import units
from layerwise.report.content import Lines, Report, facts
from layerwise.version import __version__

EXTRAS = (
    *("onnx", "matplotlib", "plotly", "mlxtend", "scikit-learn", "transformers", "accelerate", "lightning"),
    *("monai", "nnunetv2", "nibabel", "zarr"),
)
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")
SHARED, LITTLE = Path("/dev/shm"), 2**28  # bytes of shared memory below which data loaders and NCCL fail
RANKS = 2
TEST = """
import torch
import layerwise
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4)).double()
x = torch.randn(4, 8, dtype=torch.float64)
wanted = net(x)
options = layerwise.ParallelOptions(measure_s=0, profile="cpu,node=2", timeout_s=10)
model = layerwise.parallelize(net, x[:2], strategy={"0": {"c": 2}, "2": {"n": 2}}, verbose=False, options=options)
share = model.share()
found = model(x[share])
found.mean().backward()
torch.testing.assert_close(found, wanted[share])
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    p = Parser(
        prog="layerwise doctor", description="Says what is installed here, and whether two ranks compute as one."
    )
    p.add_argument("--timeout", type=positive, default=20.0, metavar="S", help="seconds for each wait (default: 20)")
    output_arguments(p)
    return p


@command(parser)
def main(args: argparse.Namespace) -> int:
    """Looks, tries, prints; 1 where something is broken."""
    rows, wrong = dict[str, str](), list[str]()
    for what, look in _looks(args.timeout).items():
        try:
            rows[what] = look()
        except Exception as error:  # whatever is broken here is what is asked for
            rows[what] = f"BROKEN: {' '.join(str(error).split()) or type(error).__name__}"
            wrong.append(what)
    verdict = f"Broken: {', '.join(wrong)}." if wrong else "Nothing is broken."
    report = Report("layerwise", f" {__version__}", [facts(rows.items()), Lines([verdict])], lambda: rows)
    present(report, args)
    return int(bool(wrong))


def _looks(timeout_s: float) -> dict[str, Callable[[], str]]:
    return {
        "Python": lambda: f"{platform.python_version()} on {platform.platform()}",
        "torch": _torch,
        "devices": _devices,
        "backends": _backends,
        "GPU links": lambda: _said(["nvidia-smi", "topo", "-m"], timeout_s),
        "extras": _extras,
        "environment": lambda: ", ".join(f"{n}={os.environ[n]}" for n in VARIABLES if n in os.environ) or "as usual",
        "host name": _host,
        "shared memory": _shared,
        "cache": _cache,
        f"{RANKS} ranks": lambda: _self_test(timeout_s),
    }


def _torch() -> str:
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" * bool(torch.version.hip)
    return f"{torch.__version__}{', ' * bool(cuda)}{cuda}, {torch.get_num_threads()} threads"


def _devices() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"no GPU; {os.cpu_count()} cores"
    said = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        torch.ones(1, device=f"cuda:{i}").add_(1).item()  # raises where it cannot be used
        row = reported(p.name)
        said.append(f"{p.name}, {units(p.total_memory, 'B')}" + (f" (--gpu {row})" if row else ""))
    return "; ".join(said)


def _backends() -> str:
    import torch.distributed as dist

    if not dist.is_available():
        raise RuntimeError("this build of PyTorch has no torch.distributed")
    there = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available()}
    if not there["gloo"]:
        raise RuntimeError("this build of PyTorch has no gloo, which layerwise needs between CPUs")
    return ", ".join(name for name, available in there.items() if available)


def _extras() -> str:
    there = []
    for name in EXTRAS:
        try:
            there.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(there) or "none"


def _said(command: list[str], timeout_s: float) -> str:
    """What a program says; where it is not there, that."""
    if shutil.which(command[0]) is None:
        return f"not known: there is no {command[0]}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    return done.stdout.partition("\n\n")[0].strip()


def _host() -> str:
    name = socket.gethostname()
    try:
        return f"{name} is {socket.gethostbyname(name)}"
    except OSError:
        raise RuntimeError(f"{name} has no address: put it into /etc/hosts, or set GLOO_SOCKET_IFNAME") from None


def _shared() -> str:
    if not SHARED.is_dir():
        return "not as on Linux"
    free = shutil.disk_usage(SHARED).free
    if free < LITTLE:
        raise RuntimeError(f"{units(free, 'B')} free in {SHARED}: start the container with --shm-size=8g")
    return f"{units(free, 'B')} free"


def _cache() -> str:
    place = folder()
    place.mkdir(parents=True, exist_ok=True)
    trial = place / f".doctor-{os.getpid()}"
    trial.write_text("")
    trial.unlink()
    return f"{place} can be written"


def _self_test(timeout_s: float) -> str:
    """Two ranks of this machine split a network, over gloo; their outputs are one device's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TEST],
            env=os.environ | place | _seat(rank),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    until = time.monotonic() + timeout_s
    try:
        for rank, process in enumerate(ranks):
            _, errors = process.communicate(timeout=max(until - time.monotonic(), 0.1))
            if process.returncode:
                raise RuntimeError(f"rank {rank}: {(errors.strip().splitlines() or ['it died'])[-1]}")
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {timeout_s:g} s: a firewall or a full machine; try --timeout 60") from None
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return "compute as one device"


def _seat(rank: int) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    return {name: str(value) for name, value in names.items()}


if __name__ == "__main__":
    sys.exit(run_main(main))
