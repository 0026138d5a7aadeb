"""Machine: the profile to plan with: what the user names, or a built-in one by the device's name."""

from __future__ import annotations

import os
from dataclasses import dataclass

from layerwise.api.world import World
from layerwise.machine import load as load_profile
from layerwise.machine import names
from layerwise.machine.profile import Profile

# Part of the device's name, as CUDA has it -> built-in profile.
KNOWN = {"h100": "h100", "p100": "p100", "v100": "v100", "a6000": "pcie", "cpu": "cpu"}
NEAREST = "h100"  # for other GPUs


@dataclass(frozen=True, slots=True)
class Machine:
    """A profile, and what the user should know of it."""

    profile: Profile
    source: str  # where it comes from
    notes: tuple[str, ...] = ()  # what else, a line each


def given(wanted: Profile | str | os.PathLike[str]) -> Machine:
    """The profile that the user names; LayerwiseError where there is none."""
    if isinstance(wanted, Profile):
        return Machine(wanted, f"profile {wanted.name}, as given")
    return Machine(load_profile(wanted), f"profile {os.fspath(wanted)}, as given")


def built_in(world: World) -> Machine:
    """What fits the devices best without a measurement."""
    name = next((known for part, known in KNOWN.items() if part in world.device.lower()), None)
    if name is not None:
        assert name in names()
        return Machine(load_profile(name), f"built-in profile {name}; nothing was measured here")
    return Machine(
        load_profile(NEAREST),
        f"built-in profile {NEAREST}, for want of one of {world.device}: ParallelOptions(profile=...) names another",
    )
