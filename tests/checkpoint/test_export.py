"""layerwise export: one file of a checkpoint, which the original model takes with strict=True."""

import json
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from layerwise import tensorfile
from layerwise.__main__ import dispatch
from layerwise.checkpoint import save
from layerwise.commands.export import export
from layerwise.errors import LayerwiseError
from tests.checkpoint.runs import equal
from tests.comm.thread import ThreadComm, run_threads
from tests.run.cut_modules import CutModule, cutting


class Tied(nn.Module):
    """A parameter with three names, buffers, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(5, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.decode = nn.Linear(5, 3, bias=False)
        self.decode.weight = self.encode.weight
        self.again = nn.ParameterDict({"w": self.encode.weight})
        self.register_buffer("mask", torch.rand(4, 3) < 0.5)
        self.frozen = nn.Parameter(torch.rand(7).double(), requires_grad=False)


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, nn.Module]:
    """A checkpoint of step 1 and 2 that four ranks have written, and the model with the values of step 2."""
    model = Tied()
    model.norm.running_mean += torch.randn(3)
    names = [name for name in model.state_dict() if name not in ("decode.weight", "again.w")]
    whole = {name: model.state_dict()[name] for name in names}
    aliases = {"encode.weight": ("decode.weight", "again.w")}

    def rank(comm: ThreadComm) -> None:
        module = CutModule(comm, whole, cutting(whole, 4, 8), aliases=aliases)
        optimizer = torch.optim.Adam(module.parameters())
        module.set_gradients({name: torch.ones_like(t) for name, t in whole.items() if t.is_floating_point()})
        optimizer.step()
        module.steps_done += 1
        save(tmp_path / "run", module, optimizer, {})
        for name, tensor in module.held.items():
            box = module.cut[name][comm.rank]
            assert box is not None
            tensor.detach().copy_(whole[name][box.slices()])
        module.steps_done += 1
        save(tmp_path / "run", module, optimizer, {})

    run_threads(4, rank)
    return tmp_path / "run", model


def test_the_original_model_takes_it(run: tuple[Path, nn.Module], tmp_path: Path) -> None:
    folder, model = run
    out = tmp_path / "model.safetensors"
    done = export(folder, out)
    found = load_file(out)
    assert equal(found, model.state_dict())
    other = Tied()
    other.load_state_dict(found, strict=True)
    assert equal(other.state_dict(), model.state_dict())
    assert (done.checkpoint, done.out, done.steps) == (str(folder / "step-00000002"), str(out), 2)
    assert (done.tensors, done.bytes) == (len(found), out.stat().st_size)
    assert export(folder / "step-00000001", out).steps == 1  # an older one, over the file that is there
    assert load_file(out).keys() == found.keys()
    assert not equal(load_file(out), found)


def test_command(run: tuple[Path, nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = run
    out = tmp_path / "model.safetensors"
    assert dispatch(["export", str(folder), str(out)]) == 0
    shown = capsys.readouterr().out
    assert "10 tensors" in shown
    assert "of step 2" in shown
    assert dispatch(["export", "--json", str(folder / "step-00000002"), str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "checkpoint": str(folder / "step-00000002"),
        "out": str(out),
        "tensors": 10,
        "bytes": out.stat().st_size,
        "steps": 2,
    }
    with pytest.raises(SystemExit):
        dispatch(["export", "--help"])
    assert "strict=True" in capsys.readouterr().out


def test_what_is_there_stays_where_it_fails(run: tuple[Path, nn.Module], tmp_path: Path) -> None:
    folder, _ = run
    out = tmp_path / "model.safetensors"
    out.write_text("before")

    def reason(checkpoint: Path, target: Path = out) -> str:
        with pytest.raises(LayerwiseError) as error:
            export(checkpoint, target)
        assert out.read_text() == "before"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "run"]
        return str(error.value)

    assert "there is no such folder" in reason(tmp_path / "none")
    assert "no complete checkpoint" in reason(tmp_path)
    assert "cannot be written: No such file or directory" in reason(folder, tmp_path / "none" / "model.safetensors")
    assert "cannot be written: Is a directory" in reason(folder, tmp_path)
    assert "cannot be written: embedded null byte" in reason(folder, tmp_path / "x\0")
    file = max((folder / "step-00000002").glob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert f"{str(file)!r} is damaged" in reason(folder)


def test_one_tensor_at_a_time(run: tuple[Path, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = run
    alive: list[weakref.ref[Tensor]] = []
    real = tensorfile.write_tensors

    def watched(path: Path, specs: Mapping[str, tensorfile.Spec], read: Callable[[str], Tensor]) -> Any:
        def one(name: str) -> Tensor:
            assert not [tensor for tensor in alive if tensor() is not None]
            tensor = read(name)
            alive.append(weakref.ref(tensor))
            return tensor

        return real(path, specs, one)

    monkeypatch.setattr(tensorfile, "write_tensors", watched)
    assert export(folder, tmp_path / "model.safetensors").tensors == len(alive) == 10


def test_a_crash_leaves_what_was_there(
    run: tuple[Path, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = run
    out = tmp_path / "model.safetensors"
    out.write_text("before")

    def full(path: Path, *_: object) -> str:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorfile, "write_tensors", full)
    with pytest.raises(LayerwiseError, match="cannot be written: No space left on device"):
        export(folder, out)
    assert out.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "run"]
