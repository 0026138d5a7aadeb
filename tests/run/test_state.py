"""State dicts of a split plan: DTensors, which dcp saves; on ranks that are no processes their boxes."""

import copy

import pytest
import torch
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.run.parallel import ParallelModule
from tests.run.small_modules import layered_mlp, mlp, on_ranks, plan_of, refused

CUT = {"c": 2}


def own(made: ParallelModule) -> dict[str, Tensor]:
    return copy.deepcopy(made.state_dict())


def test_where_every_rank_holds_all_the_state_dict_is_the_models() -> None:
    module, network = mlp()
    for state in on_ranks(network, own, 2):
        assert list(state) == list(module.state_dict())
        copy.deepcopy(module).load_state_dict(state)


@pytest.mark.parametrize("degrees", [CUT, {"n": 2}, {}], ids=str)
def test_a_rank_takes_its_own_and_the_whole_state_dict(degrees: dict[str, int]) -> None:
    """Also where rank 1 has no layer at all."""
    _, network = mlp()

    def rank(made: ParallelModule) -> tuple[dict[str, Tensor], ...]:
        whole, mine = made.full_state_dict(), own(made)
        with torch.no_grad():
            for p in made.parameters():
                p.zero_()
        made.load_state_dict(mine)
        first = made.full_state_dict()
        with torch.no_grad():
            for p in made.parameters():
                p.zero_()
        made.load_state_dict(whole)
        return whole, first, made.full_state_dict()

    for whole, *others in on_ranks(network, rank, 2, plan_of(network, 2, degrees)):
        assert all(torch.equal(value, other[name]) for other in others for name, value in whole.items())


@pytest.mark.parametrize("strict", [True, False])
def test_tensors_of_other_shapes_are_refused(strict: bool) -> None:
    _, network = layered_mlp()
    (full, _) = on_ranks(network, own, 2)
    for text in refused(
        network, lambda made: made.load_state_dict({**full, "0.weight": torch.zeros(3, 4)}, strict=strict)
    ):
        assert text == "'0.weight' has shape (3, 4) in the state dict, but (6, 4) in the model"


def test_nothing_is_loaded_where_something_is_refused() -> None:
    _, network = mlp()

    def rank(made: ParallelModule) -> bool:
        before = own(made)
        wrong = {key: value + 1 for key, value in before.items()} | {"nonsense": torch.zeros(1)}
        with pytest.raises(LayerwiseError, match="'nonsense', which the model does not have"):
            made.load_state_dict(wrong)
        return all(torch.equal(value, before[key]) for key, value in made.state_dict().items())

    assert all(on_ranks(network, rank, 2, plan_of(network, 2, CUT)))


def test_the_state_dict_of_a_module_around_it_has_its_own() -> None:
    _, network = layered_mlp()
    (state,) = on_ranks(network, lambda made: nn.Sequential(made, nn.Linear(3, 3)).state_dict(), 1)
    assert {"0.0.weight", "1.weight"} <= set(state)
    (state,) = on_ranks(network, lambda made: made.state_dict(prefix="model."), 1)
    assert next(iter(state)) == "model.0.weight"
