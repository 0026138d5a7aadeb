"""What plans leave to libraries."""

from __future__ import annotations

import pytest

from layerwise.machine import load, reserved_bytes


@pytest.mark.parametrize(("profile", "share"), [("h100", 1.5e9), ("p100", 1.5e9), ("cpu", 0.0)])
def test_a_gpu_has_some_bytes_reserved_and_a_cpu_none(profile: str, share: float) -> None:
    devices = load(profile).device_graph(2)
    assert devices.processor.memory_bytes - devices.usable_bytes == share


def test_at_most_a_tenth_is_reserved() -> None:
    assert reserved_bytes(4e9, "cuda") == 0.4e9
    assert reserved_bytes(4e9, "cpu") == 0
