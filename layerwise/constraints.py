"""Constraints: what the user rules out of the search, layer by layer: `keep decoder.*=n`, `at-most head=2`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from layerwise.errors import LayerwiseError, nearest

if TYPE_CHECKING:
    from layerwise.config import Config

KINDS = ("keep", "at-most", "one-node", "same")
EXAMPLES = "such as 'keep decoder.*=n', 'keep head', 'at-most head=2', 'one-node encoder.*' or 'same up1=up2'"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A restriction of the configurations of the layers that a pattern names.

    Attributes:
        text: As the user wrote it.
        pattern: A layer's name, that of a module around layers, or either with * and ?.
        dims: Of the dimensions, those that may be split. None: all.
        most: Devices that a layer may be on. None: all.
        neighbours: The devices are one after another, from the first one on: of one node, if they are few enough.
        same: A pattern of further layers; they all have one configuration.
        exactly: The only configuration. None: any.
    """

    text: str
    pattern: str
    dims: tuple[str, ...] | None = None
    most: int | None = None
    neighbours: bool = False
    same: str = ""
    exactly: Config | None = None

    def names(self, layer: str) -> bool:
        """True if it is about this layer."""
        return named(self.pattern, layer) or (bool(self.same) and named(self.same, layer))

    def allows(self, config: Config) -> bool:
        """True if the layers that it names may have this configuration; `same` says nothing of one layer."""
        return (
            (self.dims is None or all(label in self.dims for label, _ in config.degrees))
            and (self.most is None or config.total <= self.most)
            and not (self.neighbours and config.placement != "contiguous")
            and (self.exactly is None or config.cells == self.exactly)
        )


def named(pattern: str, layer: str) -> bool:
    """True if a pattern names a layer, or a module that the layer is in."""
    return fnmatchcase(layer, pattern) or fnmatchcase(layer, f"{pattern}.*")


def parse_constraints(texts: Iterable[str], devices_per_node: int, labels: Sequence[str]) -> tuple[Constraint, ...]:
    """The constraints that texts such as `keep decoder.*=n` state. LayerwiseError for what is none.

    labels: of the dimensions that there are.
    """
    return tuple(dict.fromkeys(_parsed(text, devices_per_node, labels) for text in texts))


def _parsed(text: object, devices_per_node: int, labels: Sequence[str]) -> Constraint:
    if not isinstance(text, str):
        raise LayerwiseError(f"a constraint is a text, {EXAMPLES}; not {text!r}")
    kind, _, rest = text.strip().partition(" ")
    pattern, equals, value = (part.strip() for part in rest.partition("="))
    if kind not in KINDS:
        raise LayerwiseError(f"constraint {text!r}: {kind!r} is none of {', '.join(KINDS)}{nearest(kind, KINDS)}")
    if not pattern or (equals and not value) or (kind in ("at-most", "same")) > bool(equals):
        raise LayerwiseError(f"constraint {text!r}: name layers and what holds for them, {EXAMPLES}")
    if kind == "keep":
        dims = tuple(label.strip() for label in value.split(",") if label.strip())
        if odd := [label for label in dims if label not in labels]:
            raise LayerwiseError(f"constraint {text!r}: {odd[0]!r} is no dimension; there are {', '.join(labels)}")
        return Constraint(text, pattern, dims=dims)
    if kind == "at-most":
        if not re.fullmatch("[0-9]{1,9}", value) or int(value) < 1:
            raise LayerwiseError(f"constraint {text!r}: {value!r} is not a number of devices of at least 1")
        return Constraint(text, pattern, most=int(value))
    if kind == "same":
        return Constraint(text, pattern, same=value)
    if equals:
        raise LayerwiseError(f"constraint {text!r}: one-node names layers only, {EXAMPLES}")
    return Constraint(text, pattern, most=devices_per_node, neighbours=True)


def check_names(constraints: Iterable[Constraint], layers: Sequence[str]) -> None:
    """LayerwiseError for a pattern that names no layer."""
    modules = {".".join(layer.split(".")[:i]) for layer in layers for i in range(1, layer.count(".") + 1)}
    for constraint in constraints:
        for pattern in filter(None, (constraint.pattern, constraint.same)):
            if not any(named(pattern, layer) for layer in layers):
                hint = (
                    nearest(pattern, [*layers, *modules])
                    or f" (it has {', '.join(layers[:8])}{' …' * (len(layers) > 8)})"
                )
                raise LayerwiseError(
                    f"constraint {constraint.text!r} names {pattern!r}, which the model does not have{hint}; "
                    "element-wise layers go with the layer before them"
                )
