"""Guards: what a loop does around a module that is run layer by layer and would not come out right is refused."""

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.run.guards.hooks import check_modules
from layerwise.run.load import load
from layerwise.run.parallel import ParallelModule
from tests.run.plans import difference
from tests.run.small_modules import SAMPLES, loss, on_ranks, plan_of, refused
from tests.run.small_modules import layered_mlp as mlp

CUT = {"c": 2}
Act = Callable[[ParallelModule], object]


def step(made: ParallelModule) -> None:
    loss(made(SAMPLES[0][made.share()])).backward()


def alone() -> ParallelModule:
    _, network = mlp()
    return load(plan_of(network, 1), network, comm=SoloComm(), dtype=torch.float64)


# ------------------------------------------------------------------------------------------- outside of the model


def penalised(made: nn.Module, x: Tensor | None = None) -> None:
    x = SAMPLES[0][made.share()] if x is None else x
    (loss(made(x)) + 0.1 * sum(p.square().sum() for p in made.parameters())).backward()


@pytest.mark.parametrize("degrees", [{"n": 2}, {"c": 2}])
def test_a_weight_penalty_within_no_sync_counts_once(degrees: Mapping[str, int]) -> None:
    """Also where only the pass after it has one; gradients are the sums of one device's passes."""
    module, network = mlp()
    for of_first, of_second in ((penalised, step), (step, penalised)):
        single = copy.deepcopy(module)
        penalised(single, SAMPLES[0])
        loss(single(SAMPLES[0])).backward()

        def rank(made: ParallelModule, first: Act = of_first, second: Act = of_second) -> dict[str, Tensor]:
            with made.no_sync():
                first(made)
            second(made)
            torch.optim.SGD(made.parameters(), lr=1.0).step()
            return made.full_state_dict()

        torch.optim.SGD(single.parameters(), lr=1.0).step()
        for found in on_ranks(network, rank, 2, plan_of(network, 2, degrees)):
            for name, value in single.state_dict().items():
                assert difference(found[name], value) <= 1e-12, name


# ------------------------------------------------------------------------------------------- hooks


def hooked(made: ParallelModule) -> None:
    """It would be called before the sum over the ranks."""
    made.get_parameter("0.weight").register_hook(lambda g: g)
    step(made)


def hooked_between_the_passes(made: ParallelModule) -> None:
    out = loss(made(SAMPLES[0][made.share()]))
    for p in made.parameters():
        p.register_hook(lambda g: g)
    out.backward()


def hooked_and_penalised(made: ParallelModule) -> None:
    """The hook would be called twice, with a part of the gradient each time."""
    p = made.get_parameter("0.weight")
    p.register_post_accumulate_grad_hook(lambda _: None)
    (loss(made(SAMPLES[0][made.share()])) + p.square().sum()).backward()


EARLY = "parameter '0.weight' has a hook, which would not be called with its full gradient"
HOOKS: list[tuple[Act, Mapping[str, int], str]] = [
    (hooked, CUT, EARLY),
    (hooked, {"n": 2}, EARLY),
    (hooked_between_the_passes, {"n": 2}, EARLY),
    (hooked_and_penalised, {"n": 2}, "The hook would be called twice"),
]


@pytest.mark.parametrize(("act", "degrees", "message"), HOOKS)
def test_hooks_of_gradients_are_refused(act: Act, degrees: Mapping[str, int], message: str) -> None:
    _, network = mlp()
    assert all(message in text for text in refused(network, act, 2, plan_of(network, 2, degrees)))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_on_one_device(register: str) -> None:
    made, module, seen = alone(), copy.deepcopy(mlp()[0]), list[Tensor]()
    getattr(made.get_parameter("0.weight"), register)(lambda x: seen.append(x if x.grad is None else x.grad))
    step(made)
    loss(module(SAMPLES[0])).backward()
    assert difference(seen[0], module[0].weight.grad) <= 1e-12


class Recorder(nn.Module):
    """Hooks of its own are a part of how it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.first.register_forward_hook(self.keep)

    def keep(self, _: nn.Module, __: object, out: Tensor) -> None:
        self.kept = out

    def forward(self, x: Tensor) -> Tensor:
        self.first(x)
        return self.second(self.kept)


@pytest.mark.parametrize(
    ("register", "message"),
    [
        ("register_forward_hook", "module '0' has a forward hook"),
        ("register_forward_pre_hook", "module '0' has a forward hook"),
        ("register_full_backward_hook", "module '0' has a backward hook"),
        ("register_full_backward_pre_hook", "module '0' has a backward hook"),
    ],
)
def test_hooks_of_the_models_layers_are_refused(register: str, message: str) -> None:
    module, network = copy.deepcopy(mlp()[0]), mlp()[1]
    getattr(module[0], register)(lambda *_: None)
    with pytest.raises(LayerwiseError, match=f"{message}, which would not be called in training"):
        load(plan_of(network, 1), module, example_inputs=(SAMPLES[0],), checkpoint_activations=True)


def test_hooks_of_the_models_parameters_are_refused() -> None:
    module = copy.deepcopy(mlp()[0])
    module[0].weight.register_hook(lambda g: g)
    with pytest.raises(LayerwiseError, match=r"parameter '0\.weight' has a hook"):
        check_modules(module)


def test_hooks_that_are_a_part_of_the_model_are_not() -> None:
    module = copy.deepcopy(mlp()[0])
    prune.l1_unstructured(module[0], "weight", 0.3)
    check_modules(module)
    check_modules(Recorder())

    def recorder(*_: object) -> None:
        """As Transformers puts it on the layers of a model when that is called."""

    recorder.__module__ = "transformers.utils.output_capturing"
    module[0].register_forward_hook(recorder)
    check_modules(module)


# ------------------------------------------------------------------------------------------- around the module


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_around_the_module_is_refused_at_once(reentrant: bool) -> None:
    _, network = mlp()

    def act(made: ParallelModule) -> None:
        x = torch.ones(1, requires_grad=True)
        out = checkpoint(lambda x: made(SAMPLES[0][made.share()]) * x, x, use_reentrant=reentrant)
        loss(out).backward()

    for degrees in (CUT, {"n": 2}):
        for text in refused(network, act, 2, plan_of(network, 2, degrees)):
            assert text.startswith("torch.utils.checkpoint around the parallel model is not supported")
