"""Gradients of a split plan: what is element-wise is one device's."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from layerwise.run.parallel import ParallelModule
from tests.run.plans import difference
from tests.run.small_modules import SAMPLES, gradients, loss, mlp, on_ranks, plan_of, refused

CUT = {"c": 2}
Loop = Callable[[nn.Module], object]


def backward(made: ParallelModule, i: int = 0) -> list[Tensor]:
    """The gradients as a loop sees them."""
    loss(made(SAMPLES[i][made.share()])).backward()
    return [p.grad for p in made.parameters() if p.grad is not None]


def by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= 0.5
                p -= 0.1 * p.grad
                p.data -= 0.1 * p.grad.sign()


def by_norm(model: nn.Module) -> None:
    clip = model.clip_grad_norm_ if isinstance(model, ParallelModule) else None
    for norm, kind in ((0.1, 2.0), (0.01, float("inf")), (0.05, 1.0), (0.02, 3)):
        told = clip(norm, kind) if clip else nn.utils.clip_grad_norm_(model.parameters(), norm, norm_type=kind)
        NORMS[isinstance(model, ParallelModule)].append(float(told))


NORMS: dict[bool, list[float]] = {False: [], True: []}  # by whether it is a parallel module's


@pytest.mark.parametrize(
    ("act", "degrees"), [(by_value, CUT), (by_hand, CUT), (by_hand, {}), (by_norm, CUT), (by_norm, {})]
)
def test_what_is_element_wise_is_one_devices(act: Loop, degrees: dict[str, int]) -> None:
    """Over accumulation, no_sync and both ways to zero."""
    module, network = mlp()
    for told in NORMS.values():
        told.clear()

    def train(model: nn.Module, share: slice) -> list[dict[str, Tensor | None]]:
        optimizer, seen = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), []
        for i, to_none in enumerate((True, False, True)):
            optimizer.zero_grad(set_to_none=to_none)
            if isinstance(model, ParallelModule):
                with model.no_sync():
                    loss(model(SAMPLES[i - 1][share])).backward()
            else:
                loss(model(SAMPLES[i - 1][share])).backward()
            loss(model(SAMPLES[i][share])).backward()
            act(model)
            seen.append(gradients(model))
            optimizer.step()
        kept = [value for state in optimizer.state.values() for value in state.values()]
        assert all(type(value) is Tensor for value in kept)
        return seen

    single = copy.deepcopy(module)
    train(single, slice(None))

    def rank(made: ParallelModule) -> dict[str, Tensor]:
        train(made, made.share())
        return made.full_state_dict()

    for found in on_ranks(network, rank, 2, plan_of(network, 2, degrees)):
        for name, value in single.state_dict().items():
            assert difference(found[name], value) <= 1e-9, name
    told = NORMS[False]
    assert sorted(NORMS[True]) == pytest.approx(sorted([*told, *told]), rel=1e-9)


def test_a_norm_that_is_not_finite_is_told_on_every_rank() -> None:
    _, network = mlp()

    def act(made: ParallelModule) -> None:
        held = backward(made)
        if made.comm.rank:
            held[0].fill_(float("nan"))
        made.clip_grad_norm_(1.0, error_if_nonfinite=True)

    for text in refused(network, act, 2, plan_of(network, 2, CUT)):
        assert text == "the norm of the gradients is nan: they are not clipped"
    for text in refused(network, lambda made: made.clip_grad_norm_(1.0, 0)):
        assert text == "norm_type must be above 0, not 0"


def test_a_gradient_can_be_copied_and_saved() -> None:
    _, network = mlp()

    def rank(made: ParallelModule) -> bool:
        held, file = backward(made)[0], io.BytesIO()
        torch.save(held, file)
        file.seek(0)
        copies = [held.clone(), copy.deepcopy(held), torch.load(file, weights_only=True), torch.zeros_like(held)]
        assert "tensor" in repr(held.clone())
        assert f"{held[0, 0]:.3f}" == f"{held[0, 0].item():.3f}"
        assert held.shape == copies[0].shape
        return all(type(c) is Tensor for c in copies) and torch.equal(copies[1], copies[2])

    assert all(on_ranks(network, rank, 2, plan_of(network, 2, CUT)))


def test_a_parameter_can_be_copied_and_saved() -> None:
    _, network = mlp()

    def rank(made: ParallelModule) -> bool:
        p, file = next(made.parameters()), io.BytesIO()
        torch.save(p, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        copies = [p.detach().clone(), loaded.data, torch.zeros_like(p.detach())]
        assert type(loaded) is nn.Parameter
        assert isinstance(p, nn.Parameter)
        assert p.is_leaf
        assert "Parameter containing" in repr(p)
        assert f"{p[0, 0]:.3f}" == f"{p[0, 0].item():.3f}"
        with torch.no_grad():
            p.mul_(1.0).clamp_(-9, 9).lerp_(copies[0], 0.5)
        assert all(type(value) is Tensor for value in made.state_dict().values())
        kept = copy.deepcopy(made)
        assert all(
            torch.equal(a, b) for a, b in zip(kept.state_dict().values(), made.state_dict().values(), strict=True)
        )
        return all(type(c) is Tensor for c in copies) and torch.equal(copies[0], copies[1])

    assert all(on_ranks(network, rank, 2, plan_of(network, 2, CUT)))
