"""Seat: which rank this process is, as torchrun's environment says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from layerwise.errors import LayerwiseError


@dataclass(frozen=True, slots=True)
class Seat:
    """What torchrun's environment says of this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str  # of the store
    port: int
    agent: bool  # torchrun serves the store, else rank 0 does
    attempt: int  # torchrun's restarts

    @property
    def address(self) -> str:
        """The store's."""
        return f"{self.host}:{self.port}"


def read_environment(environment: Mapping[str, str]) -> Seat | None:
    """torchrun's variables; None where there are none. Raises LayerwiseError where they make no sense."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        raise LayerwiseError(f"{' and '.join(missing)} not set, while other variables of torchrun are: use torchrun")

    def number(name: str, low: int, high: int, default: int | None = None) -> int:
        text = environment.get(name) or str(default)
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise LayerwiseError(f"{name} is {text!r}; it must be a whole number from {low} to {high}: use torchrun")
        return int(text)

    size = number("WORLD_SIZE", 1, 2**20)
    local_size = number("LOCAL_WORLD_SIZE", 1, size, size)
    rank = number("RANK", 0, size - 1)
    return Seat(
        rank,
        size,
        number("LOCAL_RANK", 0, local_size - 1, rank % local_size),
        local_size,
        environment["MASTER_ADDR"],
        number("MASTER_PORT", 1, 65535),
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        number("TORCHELASTIC_RESTART_COUNT", 0, 2**20, 0),
    )
