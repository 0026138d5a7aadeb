"""A model that several ranks run as it was written: a loop's numbers are one device's, or refused."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network
from layerwise.ops.base import Role
from layerwise.run.layered import LayeredRun
from layerwise.run.parallel import ParallelModule, of
from layerwise.trace import Trace
from tests.run.own_modules import IMAGES, Net, alone, loss, net, same_on_ranks, state_and_gradients
from tests.run.plans import difference
from tests.run.small_modules import equal, gradients, on_ranks, plan_of, refused, traced


def trained(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
    optimizer = torch.optim.AdamW(model.parameters())
    for x in IMAGES:
        optimizer.zero_grad()
        loss(model(share(x))).backward()
        optimizer.step()
    return state_and_gradients(model)


def test_training_is_one_devices() -> None:
    same_on_ranks(trained, ranks=(2, 3, 4))  # 4 have unequal numbers of samples


def test_the_numbers_are_those_of_the_layers() -> None:
    """Dropout draws the same, batch norm has the same statistics."""
    _, network = net()
    single = trained(alone(), lambda x: x)

    def layered(made: ParallelModule) -> dict[str, Tensor]:
        assert isinstance(of(made), LayeredRun)
        trained(made, lambda x: x[made.share()])
        return made.full_state_dict()

    for degrees in ({"h": 2}, {"c": 2}):
        for one in on_ranks(network, layered, 2, plan_of(network, 2, degrees)):
            for name, value in one.items():
                assert difference(value, single[f"state {name}"]) <= 1e-9, name


@pytest.mark.parametrize("around", [False, True])
def test_checkpointing(around: bool) -> None:
    """Dropout draws again what it drew, also where the backward passes come later."""

    class Inside(Net):
        def features(self, x: Tensor) -> Tensor:
            made: Tensor = checkpoint(super().features, x, use_reentrant=False)
            return made

    @cache
    def case() -> tuple[nn.Module, Network]:
        torch.manual_seed(0)
        module = (Net if around else Inside)().double()
        return module, traced(module, IMAGES[0])

    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        call = (lambda x: checkpoint(model, x, use_reentrant=False)) if around else model
        first, second = loss(call(share(IMAGES[0]))), loss(call(share(IMAGES[1])))
        first.backward()
        second.backward()
        return {name: value for name, value in state_and_gradients(model).items() if name.startswith("gradient")}

    same_on_ranks(loop, case)
    checked, unchecked = loop(alone(case), lambda x: x), alone(net)
    first, second = loss(unchecked(IMAGES[0])), loss(unchecked(IMAGES[1]))
    first.backward()
    second.backward()
    equal({name: checked[f"gradient {name}"] for name, _ in unchecked.named_parameters()}, gradients(unchecked))


def test_uneven_batches_are_said() -> None:
    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        x = torch.cat([IMAGES[0], IMAGES[1][:1]])
        out = model(share(x), batch=len(x)) if isinstance(model, ParallelModule) else model(x)
        loss(out).backward()
        return {"own": out[0].detach()} | state_and_gradients(model)

    same_on_ranks(loop)
    for text in refused(net()[1], lambda made: made(IMAGES[0][: 1 + made.comm.rank], batch=4)):
        assert text.startswith("the ranks fed 1, 2 samples, but their shares of a batch of 4 are 2, 2")
        assert "where B is the number of samples of all ranks (model(..., batch=B))" in text
    for text in refused(net()[1], lambda made: made(IMAGES[0][:2], batch=None if made.comm.rank else 4)):
        assert text.startswith("the ranks called the model with batch=4, no batch=: pass batch= on every rank")


def test_a_step_that_failed_leaves_no_trace() -> None:
    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        loss(model(share(IMAGES[0]))).backward()
        out = model(share(IMAGES[1]))

        def fails(_: Tensor) -> None:
            raise KeyError

        made = loss(out)
        out[0].register_hook(fails)
        with pytest.raises(KeyError):
            made.backward()
        model.zero_grad()
        loss(model(share(IMAGES[2]))).backward()
        return state_and_gradients(model)

    same_on_ranks(loop)


def test_a_trace_has_a_span_a_layer_and_pass() -> None:
    def act(made: ParallelModule) -> tuple[list[str], list[str]]:
        trace = of(made).trace = Trace()
        for x in IMAGES[:2]:
            loss(made(x[made.share()])).backward()
        of(made).trace = None
        assert not made.conv._forward_hooks
        assert not made.conv._forward_pre_hooks
        spans = trace.spans()
        assert all(span.end_s >= span.start_s for span in spans)
        return sorted({span.name for span in spans if span.category == "compute"}), [span.name for span in spans]

    for size in (1, 2):
        for names, spans in on_ranks(net()[1], act, size):
            layers = {layer.name for layer in fuse(net()[1].graph).layers if layer.role is Role.COMPUTE}
            modules = layers & {name for name, _ in net()[0].named_modules()}
            assert {"conv", "left", "right", "head"} <= modules
            assert set(names) == modules | {f"{name} (backward)" for name in modules}
            assert spans.count("conv") == spans.count("conv (backward)") == 2
            assert ("waiting for gradients" in spans) == (size > 1)


def test_a_loop_that_asks_for_graphs_of_gradients_trains_as_one_device() -> None:
    """Where nobody differentiates them, as tests/loops has it refused (`penalty_on_gradients`)."""
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    network, x = traced(module, torch.randn(6, 4).double()), torch.randn(6, 4).double()

    def stepped(made: ParallelModule) -> dict[str, Tensor | None]:
        update = torch.optim.Adam(made.parameters())
        for graph in (True, False, True):
            update.zero_grad(set_to_none=graph)
            made(x[made.share()]).mean().backward(create_graph=graph)
            made.clip_grad_norm_(0.1)
            update.step()
        return gradients(made)

    whole, *parts = (on_ranks(network, stepped, 2, plan_of(network, 2, degrees)) for degrees in (None, {}))
    for found in parts:
        for name, value in found[0].items():
            assert difference(value, whole[0][name]) <= 1e-9


def test_a_gradient_penalty_of_a_part_within_no_sync_is_called_one() -> None:
    """And not a penalty on weights only."""

    def act(made: ParallelModule) -> None:
        x = torch.randn(3, 4).double().requires_grad_()
        with made.no_sync():
            (slope,) = torch.autograd.grad(made.get_submodule("head")(x).sin().sum(), x, create_graph=True)
            slope.square().sum().backward()

    for text in refused(net()[1], act):
        assert "a submodule called alone, for a gradient penalty" in text
