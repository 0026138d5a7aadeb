"""Machines: devices, the links between them, and the profiles that say where every number came from."""

from layerwise.machine.curves import Curve, Links, Overlap
from layerwise.machine.devices import DeviceGraph, Level, Processor, Tile, reserved_bytes
from layerwise.machine.layer_times import AUTOCAST, DTYPES, precision
from layerwise.machine.profile import MAX_GPUS, Link, LinkLevel, Profile
from layerwise.machine.profiles import DEFAULT, load, names, save

__all__ = [
    "AUTOCAST",
    "DEFAULT",
    "DTYPES",
    "MAX_GPUS",
    "Curve",
    "DeviceGraph",
    "Level",
    "Link",
    "LinkLevel",
    "Links",
    "Overlap",
    "Processor",
    "Profile",
    "Tile",
    "load",
    "names",
    "precision",
    "reserved_bytes",
    "save",
]
