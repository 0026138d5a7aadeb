"""layerwise doctor: tries what a training needs: devices, the host's name, shared memory, two ranks."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from layerwise.cli import Parser, command, output_arguments, positive, present, run_main
from layerwise.machine.catalogue import reported
from layerwise.quantities import units
from layerwise.report.content import Lines, Report, facts
from layerwise.version import __version__

SHARED, LITTLE = Path("/dev/shm"), 2**28  # bytes of shared memory below which data loaders and NCCL fail
RANKS = 2
TEST = """
import torch
import layerwise
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4)).double()
x = torch.randn(4, 8, dtype=torch.float64)
wanted = net(x)
options = layerwise.ParallelOptions(measure_s=0, profile="cpu,node=2", timeout_s=10, verbose=False)
model = layerwise.parallelize(net, x[:2], strategy={"0": {"c": 2}, "2": {"n": 2}}, options=options)
share = model.share()
found = model(x[share])
found.mean().backward()
torch.testing.assert_close(found, wanted[share])
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    p = Parser(
        prog="layerwise doctor",
        description="Tries what a training needs, and whether two ranks compute what one device does.",
    )
    p.add_argument(
        "--timeout", type=positive, default=20.0, metavar="S", help="seconds that two ranks may take (default: 20)"
    )
    output_arguments(p)
    return p


@command(parser)
def main(args: argparse.Namespace) -> int:
    """Tries, prints; 1 where something is broken."""
    tries = {"devices": _devices, "host name": _host, "shared memory": _shared}
    rows, wrong = dict[str, str](), list[str]()
    for what, look in (tries | {f"{RANKS} ranks": lambda: _self_test(args.timeout)}).items():
        try:
            rows[what] = look()
        except Exception as error:  # whatever is broken here is what is asked for
            rows[what] = f"BROKEN: {' '.join(str(error).split()) or type(error).__name__}"
            wrong.append(what)
    verdict = f"Broken: {', '.join(wrong)}." if wrong else "Nothing is broken."
    present(Report("layerwise", f" {__version__}", [facts(rows.items()), Lines([verdict])], lambda: rows), args)
    return int(bool(wrong))


def _devices() -> str:
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        raise RuntimeError("this build of PyTorch has no torch.distributed with gloo, which layerwise needs")
    names = []
    for i in range(torch.cuda.device_count()):
        torch.ones(1, device=f"cuda:{i}").add_(1).item()  # raises where it cannot be used
        name = torch.cuda.get_device_name(i)
        row = reported(name)
        names.append(name + (f" (--gpu {row})" if row else ""))
    return f"{'; '.join(names) or f'no GPU; {os.cpu_count()} cores'}; {'nccl, ' * dist.is_nccl_available()}gloo"


def _host() -> str:
    name = socket.gethostname()
    try:
        return f"{name} is {socket.gethostbyname(name)}"
    except OSError:
        raise RuntimeError(f"{name} has no address: put it into /etc/hosts, or set GLOO_SOCKET_IFNAME") from None


def _shared() -> str:
    free = shutil.disk_usage(SHARED).free if SHARED.is_dir() else None
    if free is not None and free < LITTLE:
        raise RuntimeError(f"{units(free, 'B')} free in {SHARED}: start the container with --shm-size=8g")
    return "not as on Linux" if free is None else f"{units(free, 'B')} free"


def _self_test(timeout_s: float) -> str:
    """Two ranks of this machine split a network, over gloo; their outputs are one device's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "CUDA_VISIBLE_DEVICES": ""}
    place |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    environments = [os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]
    start = partial(subprocess.Popen[str], [sys.executable, "-c", TEST], text=True, stderr=subprocess.PIPE)
    ranks, until = [start(env=environment) for environment in environments], time.monotonic() + timeout_s
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


if __name__ == "__main__":
    sys.exit(run_main(main))
