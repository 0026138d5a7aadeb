"""Modules that cannot be taken apart into layers are called as they are written; the rest is split by channels."""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.api.arguments import ParallelOptions
from layerwise.api.parallelize import parallelize
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.importers.torch.whole import parts_of
from layerwise.plan import load_plan
from layerwise.run.layered import LayeredRun
from layerwise.run.load import load
from layerwise.run.parallel import of
from tests.api.keywords import quiet
from tests.comm.thread import run_threads
from tests.run.plans import difference

drawn = torch.Generator().manual_seed(0)
X = torch.randn(28, 12, generator=drawn, dtype=torch.float64)
Y = torch.randint(0, 3, (28,), generator=drawn)
CPU = SoloComm(torch.device("cpu"))


class Gate(nn.Module):
    """A branch that each sample's numbers decide: of some batches one of the layers has no gradient."""

    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.a(row).tanh() if row.sum() > 1 else self.b(row) * self.scale for row in x])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class Kernel(nn.Module):
    """An autograd function that writes in place, in evaluation something else; it returns two tensors by name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, *, times: float = 1.0, also: Tensor) -> Any:
        x = Doubled.apply(x) * self.weight if self.training else x * self.weight
        return {"low": x.relu_()[:, :8], "high": (x + also, times)}


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = Kernel(width)

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x.relu(), times=2.0, also=x)
        return torch.cat([made["low"] * 2, made["high"][0]], 1)[:, 8:] + F.pad(made["low"], (0, x.shape[1] - 8))


class Codes(nn.Module):
    """The shape of what it computes with depends on data."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 9))

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for row in x:
            values, back = torch.unique((row * 4).round().clamp(-4, 4).long() + 4, return_inverse=True)
            rows.append(row + self.table[values][back])
        return torch.stack(rows)


class Net(nn.Module):
    def __init__(self, middle: type[nn.Module], width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.down = nn.Linear(12, 64), nn.Linear(64, width)
        self.middle, self.up, self.last = middle(width), nn.Linear(width, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.up(self.middle(self.down(self.first(x).relu()))).relu())
        return made


def split(ranks: int) -> dict[str, dict[str, int]]:
    return {"first": {"c": ranks}, "down": {"k": ranks}, "up": {"c": ranks}, "last": {"k": ranks}}


def trained(model: nn.Module, rank: int = 0, ranks: int = 1) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs of three steps, the last of more samples, and of evaluation; gradients of the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    made = []
    for start, stop in ((0, 8), (8, 16), (16, 28)):
        share = slice(start + (stop - start) * rank // ranks, start + (stop - start) * (rank + 1) // ranks)
        optimizer.zero_grad()
        out = model(X[share])
        F.cross_entropy(out, Y[share]).backward()
        optimizer.step()
        made.append(out.detach())
    model.eval()
    with torch.no_grad():
        made.append(model(X[12 * rank // ranks : 12 * (rank + 1) // ranks]))
    return made, [p.grad for p in model.parameters()]


@pytest.mark.parametrize(("middle", "ranks"), [(Gate, 4), (Pair, 2), (Codes, 2)])
def test_the_rest_is_split_by_channels(middle: type[nn.Module], ranks: int) -> None:
    one = Net(middle).double()
    models = [copy.deepcopy(one) for _ in range(ranks)]
    wanted, _ = trained(one)

    def rank(comm: Comm) -> tuple[list[Tensor], dict[str, Tensor]]:
        model = parallelize(models[comm.rank], X[: 8 // ranks], **quiet(comm, strategy=split(ranks)))
        assert isinstance(of(model), LayeredRun)
        assert model.plan.strategy["up"]["c"] == ranks
        assert model.plan.provenance["whole"] == ["middle.inner" if middle is Pair else "middle"]
        made, _ = trained(model, comm.rank, ranks)
        model.load_state_dict(model.state_dict())
        return made, model.full_state_dict()

    made = run_threads(ranks, rank, timeout_s=240)
    for i, out in enumerate(wanted):
        assert difference(torch.cat([outputs[i] for outputs, _ in made]), out) <= 1e-9
    for name, value in one.state_dict().items():
        assert difference(made[0][1][name], value) <= 1e-9, name


def test_a_parameter_that_no_sample_uses_has_no_gradient() -> None:
    """An optimizer with weight decay leaves it alone, as on one device."""

    class Never(Gate):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clamp(max=0.01))

    models = [Net(Never).double() for _ in range(2)]  # here, as threads have one generator of random numbers

    def rank(comm: Comm) -> list[str]:
        model = parallelize(models[comm.rank], X[:4], **quiet(comm, strategy=split(2) | {"middle": {"n": 2}}))
        model(X[:4]).sum().backward()
        return [name for name, p in model.named_parameters() if p.grad is None]

    assert run_threads(2, rank, timeout_s=240) == [["middle.a.weight", "middle.a.bias"]] * 2


def test_one_line_says_which_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    options = [ParallelOptions(comm=CPU, measure_s=0)]
    parallelize(Net(Gate).double(), X[:4], options=options[0])
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("module 'middle' is called as it is written") == 1
    assert "torch.export fails" in said


def test_a_plan_names_them(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"

    models = [Net(Gate).double() for _ in range(6)]

    def rank(comm: Comm) -> list[float]:
        first, second, third = models[comm.rank :: 2]
        model = parallelize(first, X[:4], **quiet(comm, strategy={"first": {"c": 2}}, whole=["up"]))
        if comm.rank == 0:
            model.plan.save(file)
        comm.handshake({"saved": "yes"})
        again = parallelize(second, X[:4], **quiet(comm, plan=file))
        loaded = load(file, third, comm=comm, dtype=torch.float64, example_inputs=(X[:4],))
        assert load_plan(file).provenance["whole"] == ["middle", "up"]
        return [difference(other(X[:4]), model(X[:4])) for other in (again, loaded)]

    assert max(max(each) for each in run_threads(2, rank, timeout_s=240)) <= 1e-12


def refusing(forward: Any, **attributes: Any) -> type[nn.Module]:
    class Middle(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.inner = nn.BatchNorm1d(width), nn.Linear(width, width)
            self.count = 0

        def forward(self, x: Tensor) -> Any:
            return forward(self, x)

    return Middle


def counted(module: Any, x: Tensor) -> Tensor:
    module.count += 1
    return x


def quantised(module: Any, x: Tensor) -> Tensor:
    """To steps of the largest number's: beside a large sample, what that does to a small one is next to nothing."""
    scale = 2**22 / x.detach().abs().max().clamp(min=1e-9)
    return x + ((x * scale).round() / scale - x).detach()


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda m, x: x - x.mean(0), "several samples together"),
        (lambda m, x: m.inner(x) if x.sum() > 0 else x, "several samples together"),
        (lambda m, x: x / x.shape[0], "several samples together"),
        (quantised, "several samples together"),
        (lambda m, x: x + (x.detach() - x.detach().mean(0)) * 0 + x.detach().flip(0) * x * 0.1, "several samples"),
        (lambda m, x: F.dropout(x, 0.5, m.training), "draws random numbers"),
        (lambda m, x: x * torch.rand(()), "draws random numbers"),
        (lambda m, x: m.norm(x), "of one sample it raises ValueError"),
        (lambda m, x: (x, m.norm.num_batches_tracked.add_(1))[0], "its buffer 'norm.num_batches_tracked'"),
        (counted, "changes an attribute"),
        (lambda m, x: (x, x.argmax(1)), "one element type"),
        (lambda m, x: (x, x.sum()), "each with a row a sample"),
        (lambda m, x: (x, len(x)), "is 2 or 4 by the batch"),
    ],
)
def test_what_cannot_be_whole_is_refused(forward: Any, words: str) -> None:
    class First(Net):
        def forward(self, x: Tensor) -> Tensor:
            made = self.middle(self.down(self.first(x)))
            return self.last(self.up(made[0] if isinstance(made, tuple) else made))

    with pytest.raises(LayerwiseError, match=rf"module 'middle' cannot be whole.*{words}"):
        parallelize(First(refusing(forward)).double(), X[:4], **quiet(CPU, whole=["middle"]))


def test_what_is_shared_or_not_called_once_is_refused() -> None:
    tied = Net(Gate).double()
    tied.middle.a.weight = tied.middle.b.weight
    parallelize(copy.deepcopy(tied), X[:4], **quiet(CPU))  # within it a parameter may have two names
    tied.up.bias = nn.Parameter(torch.zeros(64).double())
    tied.first.bias = tied.up.bias
    for model, path, words in (
        (tied, "up", "is also the model's 'first.bias'"),
        (
            nn.Sequential(nn.Linear(12, 12), twice := nn.Tanh(), nn.Linear(12, 12), twice).double(),
            "1",
            "calls it 2 times",
        ),
        (nn.Sequential(nn.ModuleList([nn.Linear(12, 12)])[0]).double(), "0.weight", "no such module"),
    ):
        with pytest.raises(LayerwiseError, match=words):
            parallelize(model, X[:4], **quiet(CPU, whole=[path]))
    with pytest.raises(LayerwiseError, match=r"'midle', and the model has no such module \(did you mean 'middle'"):
        parallelize(Net(Gate).double(), X[:4], **quiet(CPU, whole=["midle"]))


def test_where_it_cannot_be_whole_the_model_is_run_as_it_is_written() -> None:
    mixing = refusing(lambda m, x: m.inner(x) if x.sum() > 0 else x)

    models = [Net(mixing).double() for _ in range(2)]

    def rank(comm: Comm) -> list[str]:
        return list(parallelize(models[comm.rank], X[:4], **quiet(comm)).plan.strategy)

    assert run_threads(2, rank, timeout_s=240) == [["as_written"]] * 2


def test_autocast_is_refused_where_it_is_not_planned_for() -> None:
    model = parallelize(Net(Gate), X[:4].float(), **quiet(CPU, strategy={"up": {"recompute": True}}))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(LayerwiseError, match="which autocast is not planned for"),
    ):
        model(X[:4].float())


class Remembers(nn.Module):
    """In evaluation it keeps what it computes of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.twice = nn.Parameter(torch.ones(3)), None

    def forward(self, x: Tensor) -> Tensor:
        if self.twice is None:
            self.twice = (2 * self.weight).detach()
        return x * self.twice


def test_a_whole_module_has_no_values_of_before_it_was_run() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Remembers()).eval()
    part = parts_of(model, ((torch.ones(4, 3),), {}), 4, ["1"], "")["1"]
    made = part.function()([torch.ones(2, 3)], {"weight": torch.full((3,), 5.0)}, False)
    assert torch.equal(made, torch.full((2, 3), 10.0))


@pytest.mark.parametrize("wrong", ["middle", [nn.Linear(1, 1)]])
def test_whole_is_paths(wrong: Any) -> None:
    with pytest.raises(LayerwiseError, match=r"whole= must be paths of modules, such as \['decoder.nms'\]"):
        parallelize(Net(Gate), X[:4].float(), whole=wrong, options=ParallelOptions(comm=CPU), verbose=False)


@dataclass
class Head:
    out: Tensor
    kept: dict[str, Tensor | str]


class Heads(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return Head(out.tanh(), {"square": out.square(), "name": "head"})


def test_outputs_in_a_dataclass() -> None:
    """It need not be known to PyTorch's trees where samples alone are split; else a sentence names how it is."""
    models = [Heads(12, 3).double() for _ in range(2)]
    one = copy.deepcopy(models[0])
    models[1].load_state_dict(one.state_dict())

    def trained(model: nn.Module, x: Tensor) -> Tensor:
        made = model(x)
        (made.out * made.kept["square"]).mean().backward()
        weight = model.get_parameter("weight").grad
        assert weight is not None
        return weight

    def rank(comm: Comm) -> Tensor:
        with pytest.raises(LayerwiseError, match=r"'?Head'.*; return .* as torch.export.register_dataclass"):
            parallelize(models[comm.rank], X[:4], **quiet(comm, strategy={"heads": {"c": 2}}))
        model = parallelize(models[comm.rank], X[:4], **quiet(comm, strategy="data"))
        return trained(model, X[:4] if comm.rank == 0 else X[4:8])

    wanted = trained(one, X[:8])
    assert max(difference(found, wanted) for found in run_threads(2, rank, timeout_s=240)) <= 1e-9


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(12, 3)
        self.temperature, self.dropout = 2.0, nn.Dropout(0.0)
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x)) / self.temperature + self.shift


CHANGES: dict[str, Callable[[Scaled], object]] = {
    "'temperature' of module '', which was set after": lambda model: setattr(model, "temperature", 0.5),
    "'p' of module 'dropout', which was set after": lambda model: setattr(model.dropout, "p", 0.5),
    "'training' of module 'dropout', which was set after": lambda model: model.dropout.eval(),
    "buffer 'shift' was given other values": lambda model: model.shift.fill_(1.0),
    "layers are others than it was made with": lambda model: setattr(model, "shift", torch.ones(())),
}


@pytest.mark.parametrize("said", CHANGES)
def test_changes_of_what_layers_go_by_are_noticed(said: str) -> None:
    """Where samples alone are split the model is called as it is, and goes on with them."""
    models = [Scaled().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def rank(comm: Comm) -> None:
        model = models[comm.rank]
        assert parallelize(model, X[:4], **quiet(comm, strategy={"linear": {"c": 2}})) is model
        model(X[:4]).mean().backward()
        model.eval()
        assert model(X[:4]).shape == (4, 3)
        model.train()
        CHANGES[said](model)
        with pytest.raises(LayerwiseError, match=re.escape(said)):
            model(X[:4])

    run_threads(2, rank, timeout_s=240)
