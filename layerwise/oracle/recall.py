"""What the cost tables say of strategies, kept for the next run that asks the same (`layerwise.cache`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from layerwise.cache import Answers, UnkeyedError, key_of, restored
from layerwise.cost.model import CostModel
from layerwise.graph.layer import LayerGraph
from layerwise.oracle.phases import Phases
from layerwise.oracle.strategies import Shape, strategy
from layerwise.oracle.tables import Priced
from layerwise.search.recall import own_kernels

TIMES = ("overlapped_s", "exposed_s", "statistics_s")


class Recall:
    """Answers about one network, at any batch."""

    def __init__(self, answers: Answers | None, graph: LayerGraph) -> None:
        self._answers: Answers | None = None
        if answers is not None and not own_kernels(graph):
            with suppress(UnkeyedError):
                self._key = key_of(version("torch"), graph)
                self._answers = answers

    def priced(
        self, model: CostModel, facts: Sequence[object], find: Callable[[], dict[str, Priced]]
    ) -> dict[str, Priced]:
        """Strategies by name; `find` prices them where nothing is kept. facts: what they follow from beside `model`."""
        if self._answers is None:
            return find()
        key = key_of(self._key, model.graph.batch, model.devices, model.options, *facts)
        return self._answers.recalled(key, find, _as_json, lambda kept: _read(model, kept))


def _as_json(found: Mapping[str, Priced]) -> object:
    return {
        name: {"shape": asdict(p.shape), "phases": asdict(p.phases), **{time: getattr(p, time) for time in TIMES}}
        for name, p in found.items()
    }


def _read(model: CostModel, kept: Any) -> dict[str, Priced]:
    return {name: _priced(model, name, one) for name, one in kept.items()}


def _priced(model: CostModel, name: str, kept: Any) -> Priced:
    shape, phases = restored(Shape, kept["shape"]), restored(Phases, kept["phases"])
    return Priced(
        model, shape, strategy(model.graph, name, shape), phases, *(restored(float, kept[time]) for time in TIMES)
    )
