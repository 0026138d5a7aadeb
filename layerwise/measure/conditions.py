"""The conditions of measurements: the device's name, the software and PyTorch's modes."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch

from layerwise.errors import LayerwiseError
from layerwise.machine import precision
from layerwise.machine.layer_times import Conditions
from layerwise.measure.bench import Mode
from layerwise.version import __version__

TYPES = {  # of parameters, and autocast's
    "float64": (torch.float64, None),
    "float32": (torch.float32, None),
    "tf32": (torch.float32, None),
    "bf16": (torch.float32, torch.bfloat16),
}


def device_of(name: str | None) -> torch.device:
    """`cuda` if there is a GPU, else `cpu`. Raises LayerwiseError if the requested device is missing."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        built = "PyTorch finds no GPU" if torch.version.cuda else "this PyTorch is built without CUDA"
        raise LayerwiseError(f"--device cuda: {built}; measure with --device cpu, or on a machine with a GPU")
    return torch.device(name)


def mode_of(device: torch.device, dtype: str, channels_last: bool) -> Mode:
    """How kernels run. Raises LayerwiseError if kernels of this type cannot run."""
    dtype = precision(dtype)
    if dtype not in TYPES:
        raise LayerwiseError(f"--dtype {dtype}: layerwise supports only {', '.join(TYPES)}")
    if dtype == "tf32" and device.type != "cuda":
        raise LayerwiseError("--dtype tf32: only NVIDIA GPUs have it: measure float32 here")
    parameters, autocast = TYPES[dtype]
    return Mode(device, parameters, autocast, channels_last)


@contextmanager
def modes(dtype: str, tf32: Literal["off", "conv", "all"] | None, cudnn_benchmark: bool) -> Iterator[str]:
    """Sets what uses TF32 and whether cuDNN benchmarks its algorithms; yields the former, and
    restores both at the end.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark
    used = tf32 or ("all" if dtype == "tf32" else "conv")  # PyTorch's default: convolutions, but not matrix products
    try:
        cudnn.allow_tf32, matmul.allow_tf32 = used != "off", used == "all"
        cudnn.benchmark = cudnn_benchmark
        yield used
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark = before


def conditions(mode: Mode, dtype: str, tf32: str, cudnn_benchmark: bool) -> Conditions:
    """The conditions under which times are stored."""
    gpu = mode.device.type == "cuda"
    return Conditions(
        device=torch.cuda.get_device_name(mode.device) if gpu else cpu_name(),
        torch=torch.__version__,
        dtype=dtype,
        tf32=tf32 if gpu else "off",
        channels_last=mode.channels_last,
        cudnn_benchmark=cudnn_benchmark and gpu,
        threads=0 if gpu else torch.get_num_threads(),
    )


def cpu_name() -> str:
    """`AMD EPYC 9R14`, or the architecture if Linux does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.processor() or platform.machine()


def provenance(device: torch.device) -> dict[str, str]:
    """When, by what and on what the times were measured, for display."""
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": f"{cpu_name()}, {os.cpu_count()} cores",
        "system": platform.platform(),
        "python": platform.python_version(),
        "layerwise": __version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} SMs",
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        }
    return facts
