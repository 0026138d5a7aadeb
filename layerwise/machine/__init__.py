"""Machines: devices, the links between them, and the profiles that record the source of every number.

`devices` is what costs are computed for, `profiles` reads and writes files, `curves` and `layer_times` hold
measurements, `catalogue` builds a machine from a device's row and links. It knows no other room.
"""

from layerwise.machine.curves import Curve, Links, Overlap
from layerwise.machine.devices import DeviceGraph, Kind, Level, Processor, Tile, reserved_bytes
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
    "Kind",
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
