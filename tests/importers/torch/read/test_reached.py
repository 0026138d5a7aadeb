"""An import, also one that is refused, leaves what the model's code can write to as it was, whatever it is."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.importers.load import network_of


class Memory:
    """An object of the user's, whose class has state, too."""

    state: Any = None
    of_class: Any = None


@dataclass
class Kept:
    state: Any = None


GLOBAL: dict[str, Any] = {}
X = torch.randn(4, 3)


def writer(kind: str) -> tuple[Any, Any]:
    """A function that keeps a tensor somewhere, and one that reads what is there."""
    memory, kept, inner, pile, cell = Memory(), Kept(), {"a": [Memory()]}, deque[Tensor](), None

    def closure(x: Tensor) -> None:
        nonlocal cell
        cell = x  # type: ignore[assignment]

    return {
        "an object": (lambda x: setattr(memory, "state", x), lambda: vars(memory)),
        "a dataclass": (lambda x: setattr(kept, "state", x), lambda: vars(kept)),
        "a class": (lambda x: setattr(type(memory), "of_class", x), lambda: {"": Memory.of_class}),
        "an object in containers": (lambda x: setattr(inner["a"][0], "state", x), lambda: vars(inner["a"][0])),
        "a deque": (pile.append, lambda: dict(enumerate(pile))),
        "a closure": (closure, lambda: {"": cell}),
        "a global": (lambda x: GLOBAL.update(x=x), lambda: dict(GLOBAL)),
    }[kind]


class Stateful(nn.Module):
    def __init__(self, keep: Any, *, refused: bool) -> None:
        super().__init__()
        self.linear, self.keep, self.refused = nn.Linear(3, 3), keep, refused

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.keep(y)
        return y * 2 if self.refused and y.sum() > 0 else y


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize(
    "kind",
    ["an object", "a dataclass", "a class", "an object in containers", "a deque", "a closure", "a global"],
)
def test_what_a_model_keeps_is_as_before(kind: str, refused: bool) -> None:
    keep, kept = writer(kind)
    before = dict(kept())
    model = Stateful(keep, refused=refused)
    attributes = dict(vars(model))
    if refused:
        with pytest.raises(LayerwiseError, match=r"torch\.export fails"):
            network_of(model, (X,), 8, "test")
    else:
        network_of(model, (X,), 8, "test")
    assert kept() == before
    assert vars(model) == attributes


def test_values_that_a_forward_pass_writes_are_as_before() -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.seen = nn.Linear(3, 3), torch.zeros(3)

        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_exporting():
                self.linear.weight.data.clamp_(-0.01, 0.01)
                self.seen += 1.0
            made: Tensor = self.linear(x)
            return made

    model = Clamped()
    weight = model.linear.weight.detach().clone()
    with pytest.raises(LayerwiseError, match="gives other numbers"):  # the trace shows no write
        network_of(model, (X,), 8, "test")
    assert torch.equal(model.linear.weight, weight)
    assert torch.equal(model.seen, torch.zeros(3))


class Instances(dict[str, Any]):
    """As Transformers' ACT2FN: what is looked up is made anew."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


ACTIVATIONS = Instances(relu=nn.ReLU)


def test_a_table_with_ways_of_its_own_stays() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = ACTIVATIONS["relu"](self.linear(x))
            return made

    network_of(Looks(), (X,), 8, "test")
    assert dict.items(ACTIVATIONS) == {"relu": nn.ReLU}.items()
