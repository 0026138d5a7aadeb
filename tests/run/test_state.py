"""State dicts of a split plan: DTensors, which dcp saves; on ranks that are no processes their boxes."""

import copy

import pytest
import torch
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.run.parallel import ParallelModule
from tests.run.small_modules import mlp, on_ranks, plan_of

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


@pytest.mark.parametrize("degrees", [CUT, {"n": 2}], ids=["split", "data"])
def test_nothing_is_loaded_where_something_is_refused(degrees: dict[str, int]) -> None:
    _, network = mlp()
    shaped, said = (
        {"0.weight": torch.zeros(5, 4)},
        r"^'0\.weight' has shape \(5, 4\) in the state dict, but \(6, 4\)",
    )
    wrong: list[tuple[dict[str, Tensor], dict[str, bool], str]] = [
        ({"nonsense": torch.zeros(1)}, {}, "'nonsense', which the model does not have"),
        (shaped, {}, said),
        (shaped, {"strict": False}, said),
    ]
    if degrees != CUT:  # the model's own method loads what fits before it raises
        wrong = [({}, {"assign": True}, "would replace the parameters")]

    def rank(made: ParallelModule) -> bool:
        before, whole = own(made), made.full_state_dict()
        for extra, how, message in wrong:
            with pytest.raises(LayerwiseError, match=message):
                made.load_state_dict({key: value + 1 for key, value in whole.items()} | extra, **how)
        return all(torch.equal(value, before[key]) for key, value in made.state_dict().items())

    assert all(on_ranks(network, rank, 2, plan_of(network, 2, degrees)))
