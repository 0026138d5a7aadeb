"""A plan that splits samples only is run by the model as the user wrote it: a loop's numbers are one device's."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from layerwise.comm.solo import SoloComm
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network
from layerwise.ops.base import Role
from layerwise.run.load import load
from layerwise.run.module import LayeredModule
from layerwise.run.own.module import OwnModule
from layerwise.run.parallel import ParallelModule
from layerwise.run.trace import Trace
from tests.comm.thread import run_threads
from tests.run.plans import difference
from tests.run.small_modules import equal, gradients, on_ranks, plan_of, refused, traced

BATCH = 6
IMAGES = torch.randn(4, BATCH, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(nn.Module):
    """Convolutions, batch norm, a branch, dropout; its head can be left out."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.left, self.right = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.norm2 = nn.BatchNorm2d(4, momentum=0.3)
        self.drop, self.channels = nn.Dropout(p), nn.Dropout2d(p, inplace=True)
        self.head, self.second = nn.Linear(4, 5), nn.Linear(4, 2)
        self.config = {"classes": 5}

    def features(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.norm(self.conv(x)))
        x = self.channels(self.left(x) + torch.tanh(self.right(x)))
        return self.norm2(x).mean((2, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.drop(self.features(x))
        return self.head(x), self.second(x)


def loss(out: tuple[Tensor, Tensor]) -> Tensor:
    return out[0].square().sum(1).mean() + out[1].sin().sum(1).mean()


@cache
def net() -> tuple[nn.Module, Network]:
    torch.manual_seed(0)
    module = Net().double()
    return module, traced(module, IMAGES[0])


@cache
def calm() -> tuple[nn.Module, Network]:
    """Without dropout: on one device nothing stands between the user and PyTorch."""
    torch.manual_seed(0)
    module = Net(0.0).double()
    return module, traced(module, IMAGES[0])


def alone(case: Callable[[], tuple[nn.Module, Network]] = net, plan: Any = None) -> ParallelModule:
    _, network = case()
    return load(plan or plan_of(network, 1), network, comm=SoloComm(), dtype=torch.float64)


def same_on_ranks(
    loop: Callable[[nn.Module, Callable[[Tensor], Tensor]], Any],
    case: Callable[[], tuple[nn.Module, Network]] = net,
    ranks: tuple[int, ...] = (2, 3),
) -> None:
    """A loop, given the model and what takes a rank's share of a batch, has equal results on any number of ranks.

    It returns tensors by name, of which those called `own...` are by sample.
    """
    single = loop(alone(case), lambda x: x)
    for size in ranks:
        found = on_ranks(case()[1], lambda made: loop(made, lambda x: x[made.share(len(x))]), size)
        for name, value in single.items():
            if name.startswith("own") and value is not None:
                assert difference(torch.cat([one[name] for one in found]), value) <= 1e-9, (size, name)
                continue
            for one in found:
                assert (one[name] is None) == (value is None), (size, name)
                assert value is None or difference(one[name], value) <= 1e-9, (size, name)


def state_and_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    state = {f"state {name}": value.clone() for name, value in model.state_dict().items()}
    return state | {f"gradient {name}": value for name, value in gradients(model).items()}


# --------------------------------------------------------------------------------------------------- which way


def test_data_plans_are_run_by_the_module_itself() -> None:
    _, network = net()
    assert isinstance(alone(), OwnModule)
    assert on_ranks(network, lambda made: type(made), 2) == [OwnModule] * 2
    assert on_ranks(network, lambda made: type(made), 2, plan_of(network, 2, {"h": 2})) == [LayeredModule] * 2


class Functional(nn.Module):
    """Draws without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.fc(x), 0.5)


class Twice(nn.Module):
    """Calls its dropout twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc(self.drop(x)))


class Uncalled(nn.Module):
    """Draws by a function under the name of a module that is never called, as attention of Hugging Face does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.fc(x), self.dropout.p, self.training)


class Other(nn.Dropout):
    """Computes otherwise than its class."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize(
    "module",
    [Functional(), Twice(), nn.Sequential(Uncalled(), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), Other())],
    ids=["functional", "twice", "never called", "a subclass"],
)
def test_what_cannot_be_replaced_is_run_layer_by_layer(module: nn.Module) -> None:
    network = traced(module.double(), torch.randn(4, 4).double())
    for ranks in (1, 2):
        assert on_ranks(network, lambda made: type(made), ranks) == [LayeredModule] * ranks


# --------------------------------------------------------------------------------------------------- one device


def test_on_one_device_it_is_plain_pytorch_bit_by_bit() -> None:
    module, _ = calm()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        plain, mine = copy.deepcopy(module).to(dtype), copy.deepcopy(module).to(dtype)
        plan = plan_of(traced(mine, IMAGES[0].to(dtype)), 1)
        made = load(plan, mine, comm=SoloComm(), dtype=dtype, example_inputs=(IMAGES[0].to(dtype),))
        for model in (plain, made):
            optimizer = torch.optim.AdamW(model.parameters())
            for x in IMAGES:
                optimizer.zero_grad()
                loss(model(x.to(dtype))).backward()
                optimizer.step()
        for (name, value), (other, mine_) in zip(plain.state_dict().items(), made.state_dict().items(), strict=True):
            assert name == other
            assert torch.equal(value, mine_), (dtype, name)


def test_any_batch_and_any_size_on_one_device() -> None:
    module, made = copy.deepcopy(calm()[0]), alone(calm)
    for shape in ((1, 3, 6, 6), (9, 3, 11, 5)):
        x = torch.randn(shape).double()
        assert all(torch.equal(a, b) for a, b in zip(made(x), module(x), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(made(x=x), module(x=x), strict=True))


def test_parameters_are_the_users_own() -> None:
    module = copy.deepcopy(calm()[0])
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    made = load(plan_of(calm()[1], 1), module, comm=SoloComm(), dtype=torch.float64, example_inputs=(IMAGES[0],))
    assert made.module is module
    before = module.conv.weight.clone()
    loss(made(IMAGES[0])).backward()
    optimizer.step()
    assert not torch.equal(before, module.conv.weight)


def test_what_the_model_has_the_returned_one_has() -> None:
    made = alone()
    assert made.config == {"classes": 5}
    assert made.conv is made.module.conv
    assert made.features(IMAGES[0]).shape == (BATCH, 4)
    assert [name for name, _ in made.named_modules()] == [name for name, _ in net()[0].named_modules()]
    made.temperature = 2
    assert made.module.temperature == 2
    del made.temperature
    assert not hasattr(made.module, "temperature")
    made.eval()
    assert not made.training
    assert not made.module.norm.training
    made.apply(lambda m: nn.init.zeros_(m.weight) if isinstance(m, nn.Linear) else None)
    assert not made.head.weight.any()
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
        _ = made.nothing
    first = alone(lambda: _sequential())
    assert first[0] is first.module[0]
    assert len(first) == 2


@cache
def _sequential() -> tuple[nn.Module, Network]:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).double()
    return module, traced(module)


def test_copies_and_pickles() -> None:
    made = alone()
    loss(made(IMAGES[0]))
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert isinstance(again, OwnModule)
        kept = copy.deepcopy(made)
        assert all(torch.equal(a, b) for a, b in zip(again(IMAGES[1]), kept(IMAGES[1]), strict=True))
    for plain in (copy.deepcopy(made.module), pickle.loads(pickle.dumps(made.module))):
        assert type(plain) is Net
        torch.manual_seed(1)
        out = plain(IMAGES[0])
        native = Net().double()
        native.load_state_dict(made.state_dict())
        torch.manual_seed(1)
        assert all(torch.equal(a, b) for a, b in zip(out, native(IMAGES[0]), strict=True))
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    assert set(made.state_dict()) == set(net()[0].state_dict())


def test_hooks_of_layers_and_parameters() -> None:
    module = copy.deepcopy(calm()[0])
    seen = list[str]()
    module.conv.register_forward_hook(lambda *_: seen.append("conv"))
    plan = plan_of(calm()[1], 1)
    made = load(plan, module, comm=SoloComm(), dtype=torch.float64, example_inputs=(IMAGES[0],))
    assert seen == []  # not while it is traced
    made.head.register_full_backward_hook(lambda *_: seen.append("head"))
    made.head.weight.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    loss(made(IMAGES[0])).backward()
    assert sorted(seen) == ["conv", "gradient", "head"]


def test_compiled_as_one_graph() -> None:
    module, made = copy.deepcopy(calm()[0]), alone(calm)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    for x in IMAGES:
        assert all(difference(a, b) <= 1e-12 for a, b in zip(compiled(x), module(x), strict=True))


# --------------------------------------------------------------------------------------------------- several ranks


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
        assert isinstance(made, LayeredModule)
        trained(made, lambda x: x[made.share()])
        return made.full_state_dict()

    for degrees in ({"h": 2}, {"c": 2}):
        for one in on_ranks(network, layered, 2, plan_of(network, 2, degrees)):
            for name, value in one.items():
                assert difference(value, single[f"state {name}"]) <= 1e-9, name


def test_penalties_clipping_accumulation() -> None:
    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number, x in enumerate(IMAGES):
            penalty = sum(p.square().sum() for p in model.parameters())
            (loss(model(share(x))) + 0.1 * penalty).backward()
            if number % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad(set_to_none=number == 1)
        loss(model(share(IMAGES[0]))).backward()
        (0.1 * model.head.weight.square().sum()).backward()  # alone
        return state_and_gradients(model)

    same_on_ranks(loop)


def test_no_sync() -> None:
    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        for synchronised in (True, False, False, True, False):
            if isinstance(model, ParallelModule) and not synchronised:
                with model.no_sync():
                    loss(model(share(IMAGES[0]))).backward()
            else:
                loss(model(share(IMAGES[0]))).backward()
        loss(model(share(IMAGES[1]))).backward()
        return state_and_gradients(model)

    same_on_ranks(loop)


def test_several_losses_and_passes() -> None:
    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        first, second = model(share(IMAGES[0]))
        first.square().mean().backward(retain_graph=True)
        second.sin().mean().backward(retain_graph=True)
        first.exp().mean().backward()
        out = (model(share(x)) for x in IMAGES[:2])
        sum(loss(each) for each in out).backward()
        return state_and_gradients(model)

    same_on_ranks(loop)


def test_unused_and_frozen_parameters() -> None:
    """What the loss does not depend on has no gradient, as on one device."""

    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        model.norm.bias.requires_grad_(False)
        for x in IMAGES[:2]:
            model(share(x))[0].mean().backward()
        assert model.second.weight.grad is None
        assert model.norm.bias.grad is None
        first = state_and_gradients(model)
        model(share(IMAGES[2]))[1].mean().backward()
        return {f"first {name}": value for name, value in first.items()} | state_and_gradients(model)

    same_on_ranks(loop)


def test_gradients_of_inputs_and_a_penalty_of_them() -> None:
    @cache
    def case() -> tuple[nn.Module, Network]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double()
        return module, traced(module, torch.randn(6, 4).double())

    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        x = share(torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).double()).clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        penalty.backward(retain_graph=True)
        (out.mean() + penalty).backward()
        return {"own slope": slope.detach()} | state_and_gradients(model)

    same_on_ranks(loop, case, ranks=(2, 3))


def test_a_gradient_penalty_through_global_statistics() -> None:
    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        x = share(IMAGES[0]).clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
        slope.square().sum((1, 2, 3)).mean().backward()
        return gradients(model)

    same_on_ranks(loop, calm)


def test_gradients_asked_for_by_name_are_refused() -> None:
    """They would be this rank's only."""

    def act(made: ParallelModule) -> None:
        torch.autograd.grad(loss(made(IMAGES[0][made.share()])), made.head.weight)

    for text in refused(net()[1], act):
        assert text.startswith("torch.autograd.grad with respect to parameter 'head.weight' would give")


def test_parts_of_the_model_called_alone_are_refused() -> None:
    def act(made: ParallelModule) -> None:
        made.head(torch.full((2, 4), float(made.comm.rank + 1), dtype=torch.float64)).sum().backward()

    for text in refused(net()[1], act):
        assert "was given a gradient that is another one on every rank" in text


def test_hooks_of_parameters_have_the_gradient_of_all() -> None:
    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        seen = dict[str, Tensor | None]()

        def hook(p: Tensor) -> None:
            assert p.grad is not None
            seen[f"in the hook {len(seen)}"] = p.grad.clone()

        handle = model.head.weight.register_post_accumulate_grad_hook(hook)
        for x in IMAGES[:2]:
            loss(model(share(x))).backward()
        handle.remove()
        loss(model(share(IMAGES[2]))).backward()
        assert len(seen) == 2
        return seen | state_and_gradients(model)

    same_on_ranks(loop)


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


def test_averages_of_weights() -> None:
    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        averaged, optimizer = AveragedModel(model), torch.optim.SGD(model.parameters(), 0.1)
        for x in IMAGES:
            optimizer.zero_grad()
            loss(model(share(x))).backward()
            optimizer.step()
            averaged.update_parameters(model)
        averaged.eval()
        with torch.no_grad():
            own = averaged(share(IMAGES[0]))[0]
        return {"own outputs": own} | averaged.module.state_dict()

    same_on_ranks(loop)


def test_autocast_around_and_a_scaler() -> None:
    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x in IMAGES:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                made = loss(model(share(x)))
            scaler.scale(made).backward()
            scaler.step(optimizer)
            scaler.update()
        return {"weights": model.head.weight.detach()}

    single = loop(alone(calm), lambda x: x)
    for one in on_ranks(calm()[1], lambda made: loop(made, lambda x: x[made.share()]), 2):
        assert difference(one["weights"], single["weights"]) <= 0.02


def test_uneven_batches_are_said() -> None:
    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        x = torch.cat([IMAGES[0], IMAGES[1][:1]])
        out = model(share(x), batch=len(x)) if isinstance(model, ParallelModule) else model(x)
        loss(out).backward()
        return {"own": out[0].detach()} | state_and_gradients(model)

    same_on_ranks(loop)
    for text in refused(net()[1], lambda made: made(IMAGES[0][: 1 + made.comm.rank])):
        assert "give module(..., batch=B) the number of samples of all ranks" in text


def test_other_sizes_and_evaluation() -> None:
    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        x = torch.randn(6, 3, 9, 7, generator=torch.Generator().manual_seed(5)).double()
        loss(model(share(x))).backward()
        model.eval()
        with torch.no_grad():
            out = model(share(IMAGES[1]))
        return {"own": out[0]} | state_and_gradients(model)

    same_on_ranks(loop)


def test_running_statistics_of_frozen_batch_norms_stay() -> None:
    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        model.norm.eval()
        loss(model(share(IMAGES[0]))).backward()
        return state_and_gradients(model)

    same_on_ranks(loop)


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


def test_what_several_ranks_cannot() -> None:
    for act, message in (
        (pickle.dumps, "cannot be pickled"),
        (torch.compile, "torch.compile of the parallel module is not supported on several ranks"),
        (lambda made: made.compile(), "torch.compile of the parallel module is not supported on several ranks"),
        (lambda made: made.load_state_dict(made.state_dict(), assign=True), "would replace parameters"),
    ):
        for text in refused(net()[1], act):
            assert message in text


def test_the_original_is_as_before_when_it_is_let_go() -> None:
    def act(comm: Any) -> bool:
        module = copy.deepcopy(net()[0])
        made = load(plan_of(net()[1], comm.size), module, comm=comm, dtype=torch.float64, example_inputs=(IMAGES[0],))
        assert isinstance(made, OwnModule)
        loss(made(IMAGES[0][made.share()])).backward()
        made.release()
        loss(module(IMAGES[0])).backward()
        return not any("forward" in m.__dict__ for m in module.modules())

    assert all(run_threads(2, act))


def test_a_trace_has_a_span_a_layer_and_pass() -> None:
    def act(made: ParallelModule) -> tuple[list[str], list[str]]:
        trace = made.trace = Trace()
        for x in IMAGES[:2]:
            loss(made(x[made.share()])).backward()
        made.trace = None
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
