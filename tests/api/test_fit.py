"""fit: the same losses and weights on one and on two ranks, and as a plain loop over the same batches."""

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import layerwise
from layerwise.api.fit import Fitted
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.train.data import order
from tests.api.keywords import keywords
from tests.api.ranks import fitted
from tests.api.script import apart, data, network
from tests.comm.pool import run_ranks

pytestmark = pytest.mark.usefixtures("models_traced_once")

QUIET = {"options": layerwise.ParallelOptions(measure_s=0, verbose=False)}


def test_two_ranks_are_one_is_a_plain_loop() -> None:
    """19 samples in batches of 8, shuffled: the last 3 join the batch before."""
    one, state = fitted(SoloComm(), 19, {"epochs": 2, "batch": 8, "clip_norm": 1.0})
    model, losses = network(), []
    x, y = data(19).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(2):
        total, numbers = 0.0, order(19, 0, epoch)
        for batch in (numbers[:8], numbers[8:]):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item() * len(batch)
        losses.append(total / 19)
    assert [epoch.loss for epoch in one] == pytest.approx(losses, rel=1e-9)
    assert apart(state, model.state_dict()) <= 1e-9
    model.eval()
    out = model(x[-6:])
    assert one[-1].held_out["loss"] == pytest.approx(nn.functional.cross_entropy(out, y[-6:]).item(), rel=1e-9)
    assert one[-1].held_out["accuracy"] == pytest.approx((out.argmax(1) == y[-6:]).double().mean().item())
    for history, whole in run_ranks(2, "tests.api.ranks:fitted", 19, {"epochs": 2, "batch": 8, "clip_norm": 1.0}):
        assert [epoch.loss for epoch in history] == pytest.approx(losses, rel=1e-9)
        assert [epoch.held_out for epoch in history] == [pytest.approx(epoch.held_out, rel=1e-9) for epoch in one]
        assert apart(whole, state) <= 1e-9


def test_mixed_precision_is_a_plain_loop_within_autocast() -> None:
    x, y = data(16).tensors
    model, single = network().float(), network().float()
    single.load_state_dict(model.state_dict())
    how = keywords({"batch": 8, "autocast": torch.bfloat16}, comm=SoloComm())
    held, sgd = (x.float(), y), lambda parameters: torch.optim.SGD(parameters, lr=0.01)
    made = layerwise.fit(model, held, nn.CrossEntropyLoss(), sgd, held_out=held, **QUIET | how)
    optimizer, total = sgd(single.parameters()), 0.0
    numbers = order(16, 0, 0)
    for batch in (numbers[:8], numbers[8:]):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(single(x[batch].float()), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() / 2
    assert made.history[0].loss == pytest.approx(total, rel=1e-7)
    assert apart(model.state_dict(), single.state_dict()) <= 1e-7


def losses(made: Fitted) -> list[float]:
    return [epoch.loss for epoch in made.history]


def test_every_kind_of_data_gives_the_same() -> None:
    whole = data(16)
    args = nn.CrossEntropyLoss(), "sgd"
    how = {"batch": 4, **QUIET}
    expected = losses(layerwise.fit(network(), whole.tensors, *args, **how))
    assert losses(layerwise.fit(network(), TensorDataset(*whole.tensors), *args, workers=2, **how)) == expected


def test_optimizers_by_name_by_function_and_carried_over() -> None:
    def run(optimizer: object, model: nn.Module) -> list[float]:
        return losses(layerwise.fit(model, data(16).tensors, nn.CrossEntropyLoss(), optimizer, epochs=2, **QUIET))

    expected = run("momentum", network())
    assert run(lambda parameters: torch.optim.SGD(parameters, 0.01, 0.9), network()) == expected
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": [p for part in model[1:] for p in part.parameters()]}]
    assert run(torch.optim.SGD(groups, 0.01, 0.9), model) == pytest.approx(expected, rel=1e-12)
    model = network()
    groups[0]["params"], groups[1]["params"] = model[0].parameters(), [p for m in model[1:] for p in m.parameters()]
    groups[0]["lr"] = 0.0
    assert run(torch.optim.SGD(groups, 0.01, 0.9), model) != pytest.approx(expected, rel=1e-6)
    assert torch.equal(model[0].weight, network()[0].weight)  # its group's rate was 0


def test_the_scripts_own_optimizer_and_scheduler() -> None:
    """It goes on with the module's parameters; its scheduler with it."""
    draw = nn.CrossEntropyLoss()
    model, other = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    made = layerwise.fit(model, data(16).tensors, draw, optimizer, scheduler=schedule, epochs=3, **QUIET)
    assert made.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 8)
    expected = layerwise.fit(
        other, data(16).tensors, draw, lambda parameters: torch.optim.SGD(parameters, 0.05, 0.9),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), epochs=3, **QUIET,
    )  # fmt: skip
    assert losses(made) == losses(expected)
    with pytest.raises(LayerwiseError, match="the scheduler is of another optimizer"):
        layerwise.fit(model, data(16).tensors, draw, "sgd", scheduler=schedule, **QUIET)
    with pytest.raises(LayerwiseError, match="the optimizer has taken steps already"):
        layerwise.fit(model, data(16).tensors, draw, optimizer, **QUIET)


def test_a_rank_without_the_optimizers_parameters_trains_none() -> None:
    """An optimizer of one layer's parameters, which one rank alone has: the others' stay as they are."""
    model = network()
    optimizer = torch.optim.SGD(model[7].parameters(), 0.5)
    layerwise.fit(model, data(8).tensors, nn.CrossEntropyLoss(), optimizer, batch=8, **QUIET)
    for whole in run_ranks(2, "tests.api.ranks:fitted_in_part"):
        assert apart(whole, model.state_dict()) <= 1e-9
        assert torch.equal(whole["0.weight"], network()[0].weight)


def test_fit_takes_a_plan_and_makes_the_model_parallel_itself() -> None:
    model = layerwise.parallelize(network(), data(8).tensors[0])
    args = nn.CrossEntropyLoss(), "sgd"
    with pytest.raises(LayerwiseError, match="is already parallel"):
        layerwise.fit(model, data(8).tensors, *args)
    of_plan = layerwise.fit(network(), data(16).tensors, *args, strategy=layerwise.of(model).plan, **QUIET)
    assert of_plan.history  # by the plan's batch of 8, though there is more data


def test_an_optimizer_that_cannot_be_is_found_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerwise.api.fit.parallelize", None)
    for wanted in ("adm", 7, torch.optim.LBFGS):
        with pytest.raises(LayerwiseError, match="optimizer"):
            layerwise.fit(network(), data(8).tensors, nn.CrossEntropyLoss(), wanted)


def test_an_optimizer_of_whole_parameters_is_for_plans_that_split_none() -> None:
    adafactor = torch.optim.Adafactor
    for told in run_ranks(2, "tests.api.ranks:fitted_with", adafactor, {"strategy": {"7": {"c": 2}}}):
        assert "Adafactor takes a parameter as one matrix, but the plan splits" in told
    assert run_ranks(2, "tests.api.ranks:fitted_with", adafactor, {"strategy": "data"}) == ["", ""]


def test_going_on_from_a_checkpoint(tmp_path: Path) -> None:
    how = {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "batch": 4, **QUIET}
    at_once, in_parts, again = network(), network(), network()
    args = data(16).tensors, nn.CrossEntropyLoss(), "adam"
    whole = layerwise.fit(at_once, *args, epochs=3, **how)
    layerwise.fit(in_parts, *args, epochs=1, checkpoint=tmp_path, resume=True, **how)
    rest = layerwise.fit(again, *args, epochs=3, checkpoint=tmp_path, resume=True, **how)
    assert losses(rest) == losses(whole)[1:]
    assert apart(again.state_dict(), at_once.state_dict()) == 0.0
    with pytest.raises(LayerwiseError, match=r"there is a checkpoint already, .*: go on from it with resume=True"):
        layerwise.fit(network(), *args, checkpoint=tmp_path, **how)
    with pytest.raises(LayerwiseError, match="was saved with a scheduler, from which fit cannot go on"):
        layerwise.fit(network(), *args, epochs=4, checkpoint=tmp_path, resume=True, **how | {"scheduler": None})
    how["options"] = layerwise.ParallelOptions(measure_s=0, verbose=False, seed=1)
    with pytest.raises(LayerwiseError, match="was trained with seed 0, but here it is 1"):
        layerwise.fit(again, *args, epochs=3, checkpoint=tmp_path, resume=True, **how)


class SignalledWorker(TensorDataset):
    """Sends its DataLoader's worker what a job's manager sends all processes."""

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        if torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(i)


def test_a_signal_to_all_processes_ends_no_worker() -> None:
    samples = SignalledWorker(*data(8).tensors)
    made = layerwise.fit(network(), samples, nn.CrossEntropyLoss(), "sgd", batch=4, workers=2, **QUIET)
    assert len(made.history) == 1


def test_metrics_and_any_loss() -> None:
    """A regression, its own metric, no accuracy."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=draw)
    y = x @ torch.tensor([[1.0], [2.0], [3.0]])

    def worst(out: Tensor, target: Tensor) -> Tensor:
        return (out - target).abs().mean()

    made = layerwise.fit(
        nn.Linear(3, 1), (x, y), nn.functional.mse_loss, "sgd", epochs=40, batch=6, held_out=(x, y),
        metrics={"off": worst}, **QUIET,
    )  # fmt: skip
    assert set(made.history[-1].held_out) == {"loss", "off"}
    assert made.history[-1].held_out["off"] < 0.05 < made.history[0].held_out["off"]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "of type int: give"),
        (Stream(), "IterableDataset"),
        (DataLoader(data(8), 4), "data is a DataLoader: give its data set"),
        ([1, 2, 3], "of type list: give"),
        (TensorDataset(torch.zeros(4, 1, 8, 8)), r"not \(input, target\)"),
        ((torch.zeros(4, 3), torch.zeros(5)), "4 inputs, but 5 targets"),
    ],
)
def test_wrong_data(given: object, message: str) -> None:
    with pytest.raises(LayerwiseError, match=message):
        layerwise.fit(network(), given, nn.CrossEntropyLoss(), "sgd", **QUIET)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"optimizer": "sdg"}, "unknown optimizer 'sdg'"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS is stepped with a closure, which fit cannot"),
        ({"optimizer": torch.optim.SparseAdam}, "SparseAdam takes sparse gradients only"),
        ({"optimizer": torch.optim.SGD([torch.zeros(3, requires_grad=True)])}, "not the model's"),
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "must be a mean"),
        ({"resume": True}, "needs checkpoint"),
        ({"options": layerwise.ParallelOptions(io="boxes")}, "fit feeds whole samples"),
        ({"loss": nn.CrossEntropyLoss(weight=torch.ones(10))}, "class weights is no mean over samples"),
        ({"loss": nn.NLLLoss(torch.ones(10))}, "class weights is no mean over samples"),
        ({"loss": nn.CrossEntropyLoss(ignore_index=3)}, "data has targets of 3, which the loss ignores"),
        ({"loss": "ce"}, "loss is 'ce'; it must be a function"),
        ({"autocast": torch.float16}, "fit scales no losses, as float16 needs"),
        ({"autocast": torch.float64}, "it must be torch.bfloat16 or torch.float16"),
        ({"autocast": torch.bfloat16}, "plans mixed precision of a float32 model, and this one is float64"),
        ({"epochs": 0}, "epochs is 0; it must be at least 1"),
        ({"batch": 2.0}, "batch is 2.0; it must be at least 1"),
        ({"held_out": (torch.zeros(0, 1, 8, 8), torch.zeros(0))}, "held_out has no samples"),
    ],
)
def test_wrong_arguments(how: dict, message: str) -> None:
    args = {"loss": nn.CrossEntropyLoss(), "optimizer": "sgd"} | how
    with pytest.raises(LayerwiseError, match=message):
        layerwise.fit(network(), data(8).tensors, **(QUIET | args))


def test_targets_that_the_loss_ignores() -> None:
    """Also in a data set, and where they are held out only; a target of -100 of a loss that is no class is a number."""
    x, y = data(8).tensors
    ignored = y.clone()
    ignored[5] = -100
    for loss in (nn.CrossEntropyLoss(), nn.functional.cross_entropy):
        with pytest.raises(LayerwiseError, match="data has targets of -100"):
            layerwise.fit(network(), TensorDataset(x, ignored), loss, "sgd", **QUIET)
        with pytest.raises(LayerwiseError, match="held_out has targets of -100"):
            layerwise.fit(network(), (x, y), loss, "sgd", held_out=TensorDataset(x, ignored), **QUIET)
    x, y = torch.ones(4, 3), torch.full((4, 1), -100.0)
    assert layerwise.fit(nn.Linear(3, 1), (x, y), nn.functional.mse_loss, "sgd", **QUIET).history[0].loss > 1000


def test_too_few_samples_for_the_ranks() -> None:
    for message in run_ranks(2, "tests.api.ranks:too_few"):
        assert "1 samples, too few for 2 ranks" in message
