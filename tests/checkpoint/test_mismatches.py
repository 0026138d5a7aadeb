"""What does not fit together is told: a checkpoint, a model, an optimizer, and ranks among themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from layerwise.checkpoint import load, save
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from tests.checkpoint.runs import OPTIMIZERS, alone, gradients, refused, saved, train
from tests.comm.thread import ThreadComm, run_threads
from tests.run.cut_modules import CutModule, cutting, tensors


def test_another_model(tmp_path: Path) -> None:
    saved(tmp_path)

    def other(name: str, tensor: Tensor | None, renamed: str | None = None) -> CutModule:
        whole = tensors(1)
        old = whole.pop(name)
        if tensor is not None or renamed:
            whole[renamed or name] = old if tensor is None else tensor
        return CutModule(SoloComm(), whole, cutting(whole, 1, 0))

    assert "it has 'scale', which this model does not" in refused(tmp_path, other("scale", None))
    assert "no 'conv.weights' (did you mean 'conv.weight'?)" in refused(
        tmp_path, other("conv.weight", None, "conv.weights")
    )
    assert "'conv.bias' has shape [5] there, but [6] here" in refused(tmp_path, other("conv.bias", torch.ones(6)))
    assert "'scale' in float32, but it is float64 here" in refused(
        tmp_path, other("scale", torch.tensor(1.0, dtype=torch.float64))
    )


def test_another_optimizer(tmp_path: Path) -> None:
    module = alone(0, 7)
    parameters = module.parameters()
    save(tmp_path / "none", module, None, {})
    save(tmp_path / "adam", module, torch.optim.Adam(parameters), {})
    save(tmp_path / "some", module, torch.optim.Adam(parameters[1:]), {})

    def reason(folder: str, optimizer: torch.optim.Optimizer) -> str:
        return refused(tmp_path / folder, module, optimizer)

    groups = torch.optim.Adam([{"params": parameters[:1]}, {"params": parameters[1:]}])
    assert "has the state of Adam, but this optimizer is SGD" in reason("adam", torch.optim.SGD(parameters))
    assert "Adam has 1 parameter groups, but this optimizer has 2" in reason("adam", groups)
    assert "no optimizer state" in reason("none", torch.optim.Adam(parameters))
    assert "'conv.weight' is in group 0 of only one of the two" in reason("some", torch.optim.Adam(parameters))
    assert "'conv.weight' is in group 0 of only one of the two optimizers" in reason(
        "adam", torch.optim.Adam(parameters[1:])
    )
    foreign = torch.optim.Adam([torch.nn.Parameter(torch.ones(2, 9))])
    assert "a parameter of shape (2, 9) that is not the model's" in reason("adam", foreign)
    load(tmp_path / "adam", module)  # the weights alone


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    module = alone()

    def reason(optimizer: torch.optim.Optimizer | None = None, progress: Any = None, **flags: Any) -> str:
        with pytest.raises(LayerwiseError) as error:
            save(tmp_path / "run", module, optimizer, progress or {}, **flags)
        assert not list(tmp_path.glob("run/*"))
        return str(error.value)

    shampoo = torch.optim.Adafactor(module.parameters())
    module.set_gradients({name: t for name, t in gradients(0).items() if t.numel()})
    shampoo.step()
    assert "Adafactor stores 'row_var' for 'conv.weight'" in reason(shampoo)
    newton = torch.optim.LBFGS(module.parameters())
    newton.step(lambda: torch.tensor(1.0))
    assert "LBFGS stores" in reason(newton)
    assert "'progress' must consist of JSON values" in reason(progress={"x": {1, 2}})
    assert "'progress' must consist of JSON values" in reason(progress={"x": float("nan")})
    assert "at least 1 checkpoint must be kept" in reason(keep=0)
    strange = torch.optim.SGD(module.parameters())
    strange.param_groups[0]["schedule"] = object()
    assert "SGD's setting 'schedule' is a object" in reason(strange)
    complex_ = {"x": torch.ones(2, dtype=torch.complex64)}
    module = CutModule(SoloComm(), complex_, cutting(complex_, 1, 0))
    assert "cannot hold 'model.x' of torch.complex64" in reason()
    module = alone()
    (tmp_path / "file").write_text("")
    with pytest.raises(LayerwiseError, match="File exists"):
        save(tmp_path / "file", module, None, {})


def test_ranks_that_disagree(tmp_path: Path) -> None:
    def told(change: Callable[[CutModule, torch.optim.Optimizer], torch.optim.Optimizer | None]) -> str:
        def run(comm: ThreadComm) -> str:
            module = CutModule(comm, tensors(0), cutting(tensors(0), 2, 5))  # two parameters are cut
            made: torch.optim.Optimizer | None = OPTIMIZERS["adam"](module.parameters())
            assert made is not None
            train(module, made, 1)
            if comm.rank == 1:
                made = change(module, made)
            with pytest.raises(LayerwiseError) as error:
                save(tmp_path, module, made, {})
            return str(error.value)

        (reason,) = set(run_threads(2, run))
        assert not list(tmp_path.iterdir())
        return reason

    def rate(module: CutModule, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.param_groups[0]["lr"] = 7.0
        return optimizer

    def ahead(module: CutModule, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        module.steps_done += 1
        return optimizer

    def unequal(module: CutModule, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for state in optimizer.state.values():
            state["step"] += 1
        return optimizer

    def forgotten(module: CutModule, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.state.clear()
        return optimizer

    assert "rank 1 and rank 0 have different optimizers or settings" in told(rate)
    assert "rank 1 passed no optimizer, but others did" in told(lambda *_: None)
    assert "different numbers of steps: [1, 2]" in told(ahead)
    assert "state of" in told(unequal)
    assert "elements of 'optimizer.state." in told(forgotten)


def test_ranks_that_see_different_folders(tmp_path: Path) -> None:
    for name, seed in (("0", 3), ("1", 4)):
        saved(tmp_path / name, seed)

    def run(comm: ThreadComm) -> str:
        module = CutModule(comm, tensors(0), cutting(tensors(0), 2, 3))
        with pytest.raises(LayerwiseError) as error:
            load(tmp_path / str(comm.rank), module)
        with pytest.raises(LayerwiseError, match="all ranks must share the file system"):
            save(tmp_path / str(comm.rank), module, None, {})
        return str(error.value)

    assert all("ranks see different checkpoints" in reason for reason in run_threads(2, run))
    assert sorted(p.name for p in tmp_path.glob("*/*")) == ["step-00000007"] * 2
