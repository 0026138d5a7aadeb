"""The kinds of plans that a network of the zoo is run under."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from layerwise.config import Config
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network
from layerwise.plan import Plan
from tests.run.plans import optimised_plan, random_plan

RANKS = 2


def _preferring(*labels: str) -> Callable[[Network], Plan]:
    """Every layer is split along the first of `labels` that it can be split along, else along its samples."""

    def pick(configs: Sequence[Config]) -> Config:
        wanted = (Config.of({label: RANKS}) for label in (*labels, "n"))
        return next((config for config in wanted if config in configs), Config())

    def plan(network: Network) -> Plan:
        return random_plan(fuse(network.graph), RANKS, 0, "sample", pick)

    return plan


def _searched(network: Network) -> Plan:
    return optimised_plan(fuse(network.graph), RANKS)


def _random(seed: int) -> Callable[[Network], Plan]:
    return lambda network: random_plan(fuse(network.graph), RANKS, 2 * seed, "sample")  # even: of equal devices


PLANS: dict[str, Callable[[Network], Plan]] = {
    "data": _preferring(),
    "model": _preferring("c", "k"),
    "spatial": _preferring("h", "w", "d", "l", "s"),
    "searched": _searched,
    "random": _random(1),
}
