"""The conditions of measurements: the device's name, the software and PyTorch's modes; and the profile to add to."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch

from layerwise.errors import LayerwiseError
from layerwise.machine import DEFAULT, Profile, catalogue, precision
from layerwise.machine import load as load_profile
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


def base_profile(out: str | None, fallback: str | None, where: Conditions, device: torch.device) -> Profile:
    """The profile to add to: the file `out` if it exists, else the profile `fallback`, adapted to this device.

    Raises LayerwiseError if the file holds times of another device.
    """
    if out is not None and Path(out).exists():
        base = load_profile(out)
        if base.kinds:
            return on_device(base, device, where)
        others = [times.conditions.device for times in base.layers if times.conditions.device != where.device]
        if others:
            raise LayerwiseError(
                f"profile {out} has times of another device, {others[0]!r}, but this is {where.device!r}: use another "
                "--out"
            )
        if base.layers:
            return base
    else:
        source = fallback or ("cpu" if device.type == "cpu" else DEFAULT)
        base = replace(
            load_profile(source),
            name=Path(out).stem if out else "measured",
            description=f"Measured by layerwise on {where.device}; peaks and links of profile {source}.",
        )
    return on_device(base, device, where)


def kind_here(base: Profile, device: str) -> int:
    """Which of a profile's kinds the device of this name is; LayerwiseError where it is none."""
    names = [processor.name for processor in base.kinds]
    row = catalogue.devices().get(catalogue.reported(device) or "", {})
    found = [name for name in names if name in (device, row.get("name"))]
    if base.kinds and not found:
        raise LayerwiseError(f"profile {base.name} has devices of the kinds {', '.join(names)}; this is {device!r}")
    return names.index(found[0]) if found else 0


def on_device(base: Profile, device: torch.device, where: Conditions) -> Profile:
    """Returns a profile for this device, without times of others; with those of its other kinds, if it has several."""
    if base.kinds:
        here, kinds = kind_here(base, where.device), list(base.kinds)
        kinds[here] = replace(kinds[here], name=where.device)
        return replace(base, kinds=tuple(kinds), processor=kinds[0])
    sources, processor = dict(base.sources), replace(base.processor, name=where.device)
    if device.type == "cuda":
        gpu, source = torch.cuda.get_device_properties(device), f"torch {torch.__version__} on this device"
        processor = replace(processor, memory_bytes=gpu.total_memory, processors=gpu.multi_processor_count)
        sources |= {"device.memory_bytes": source, "device.processors": source}
    own = tuple(times for times in base.layers if times.conditions.device == where.device)
    return replace(base, processor=processor, sources=sources, layers=own)
