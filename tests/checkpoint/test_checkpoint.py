"""Checkpoints: what is saved under one plan is loaded under another, bit for bit; crashes and bad files do no harm."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import checkpoint as dcp

from layerwise import tensorfile
from layerwise.checkpoint import latest, load, model_digest, save, save_and_load, storage
from layerwise.checkpoint.step_folders import find
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.export import export
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from tests.comm.thread import ThreadComm, run_threads
from tests.run.cut_modules import CutModule, assembled, cutting, tensors

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.99), amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1.0),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}
UNTRAINED = "conv.bias"  # it never gets a gradient, so it has no state


def gradients(step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    whole = tensors(1000 + step, dtype)
    return {name: t for name, t in whole.items() if t.is_floating_point() and name != UNTRAINED}


def train(module: CutModule, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        module.set_gradients(gradients(module.steps, module.whole["scale"].dtype))
        optimizer.step()
        module.steps += 1


def trained(folder: Path, make: Make, ranks: int, seed: int, steps: int, dtype: torch.dtype) -> list[CutModule]:
    """Trains `steps` on so many ranks, and saves."""

    def run(comm: ThreadComm) -> CutModule:
        whole = tensors(0, dtype)
        module = CutModule(comm, whole, cutting(whole, ranks, seed))
        optimizer = make(module.parameters())
        train(module, optimizer, steps)
        save(folder, module, optimizer, {"epoch": 2})
        return module

    return run_threads(ranks, run)


def resumed(folder: Path, make: Make, ranks: int, seed: int, steps: int, dtype: torch.dtype) -> list[CutModule]:
    """Loads into other values on so many ranks, and trains `steps` more."""

    def run(comm: ThreadComm) -> CutModule:
        whole = tensors(1, dtype)
        module = CutModule(comm, whole, cutting(whole, ranks, seed))
        optimizer = make(module.parameters())
        assert load(folder, module, optimizer) == {"epoch": 2}
        train(module, optimizer, steps)
        return module

    return run_threads(ranks, run)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def alone(seed: int = 0, steps: int = 0, **changes: Any) -> CutModule:
    """A module on one rank."""
    whole = tensors(seed)
    return CutModule(SoloComm(), whole, cutting(whole, 1, 0), steps, **changes)


def saved(folder: Path, seed: int = 0, steps: int = 7, make: Make | None = None) -> CutModule:
    """A module on one rank that has a checkpoint."""
    module = alone(seed, steps)
    save(folder, module, make(module.parameters()) if make else None, {"epoch": 1})
    return module


@settings(max_examples=40)
@given(
    ranks=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    seeds=st.tuples(st.integers(0, 2**20), st.integers(0, 2**20)),
    kind=st.sampled_from(sorted(OPTIMIZERS)),
    steps=st.integers(0, 3),
)
def test_another_plan_loads_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, ranks: tuple[int, int], seeds: tuple[int, int], kind: str, steps: int
) -> None:
    folder, make = tmp_path_factory.mktemp("run"), OPTIMIZERS[kind]
    before = trained(folder, make, ranks[0], seeds[0], steps, torch.float32)
    after = resumed(folder, make, ranks[1], seeds[1], 0, torch.float32)
    assert equal(assembled(after), assembled(before))
    assert {module.steps for module in after} == {steps}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_same_plan_continues_bit_for_bit(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    make = OPTIMIZERS[kind]
    straight = trained(tmp_path / "a", make, 3, 5, 4, dtype)
    trained(tmp_path / "b", make, 3, 5, 2, dtype)
    assert equal(assembled(resumed(tmp_path / "b", make, 3, 5, 2, dtype)), assembled(straight))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_another_plan_continues_as_one_device(tmp_path: Path, kind: str) -> None:
    make = OPTIMIZERS[kind]
    straight = assembled(trained(tmp_path / "a", make, 1, 0, 4, torch.float64))
    trained(tmp_path / "b", make, 4, 1, 2, torch.float64)
    continued = assembled(resumed(tmp_path / "b", make, 5, 2, 2, torch.float64))
    for name, value in straight.items():
        torch.testing.assert_close(continued[name], value, rtol=1e-13, atol=1e-13)


def test_optimizer_is_restored(tmp_path: Path) -> None:
    """Settings, groups, and that a parameter has no state; what the new optimizer did before is forgotten."""
    module = alone()

    def make(lr: float) -> torch.optim.Optimizer:
        first, *others = module.parameters()
        return torch.optim.Adam([{"params": [first]}, {"params": others, "betas": (0.5, 0.6)}], lr=lr)

    optimizer = make(0.25)
    train(module, optimizer, 2)
    optimizer.param_groups[1]["lr"] = 1e-30
    expected = {name: optimizer.state[p] for name, p in module.named_parameters() if p in optimizer.state}
    save(tmp_path, module, optimizer, {})
    other = make(0.5)
    module.set_gradients({UNTRAINED: torch.ones(5)})
    other.step()
    load(tmp_path, module, other)
    assert [(group["lr"], group["betas"]) for group in other.param_groups] == [
        (0.25, (0.9, 0.999)),
        (1e-30, (0.5, 0.6)),
    ]
    found = {name: other.state[p] for name, p in module.named_parameters() if p in other.state}
    assert found.keys() == expected.keys() == gradients(0).keys()
    for name, state in expected.items():
        assert equal(found[name], state)
        assert {key: value.dtype for key, value in found[name].items()} == {k: v.dtype for k, v in state.items()}


def test_only_what_a_rank_owns_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, OPTIMIZERS["adam"], 4, 1, 1, torch.float32)
    read: Counter[str] = Counter()

    class Recorder:
        """safe_open, or a slice of it: counts the elements that a thread takes out."""

        def __init__(self, inner: Any, **flags: Any) -> None:
            self.inner = safe_open(inner, **flags) if flags else inner

        def __enter__(self) -> Recorder:
            return Recorder(self.inner.__enter__())

        def __exit__(self, *error: object) -> None:
            pass

        def get_slice(self, key: str) -> Recorder:
            return Recorder(self.inner.get_slice(key))

        def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
            piece: Tensor = self.inner[part]
            read[threading.current_thread().name] += piece.numel()
            return piece

    monkeypatch.setattr(storage, "safe_open", Recorder)
    for module in resumed(tmp_path, OPTIMIZERS["adam"], 3, 2, 0, torch.float32):
        trained_here = [t for name, t in module.held.items() if name in gradients(0) and t.dim()]
        adam = sum(3 * tensor.numel() for tensor in trained_here)  # AMSGrad; what is of a scalar is in the JSON
        held = sum(tensor.numel() for tensor in module.held.values())
        assert read[f"rank {module.comm.rank}"] == held + adam


def test_keeps_the_newest(tmp_path: Path) -> None:
    module = alone()
    assert latest(tmp_path / "none") is None
    for steps in (3, 1, 8, 9):
        module.steps = steps
        assert save(tmp_path, module, None, {"steps": steps}, keep=3) == tmp_path / f"step-{steps:08d}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000008", "step-00000009"]
    assert latest(tmp_path) == tmp_path / "step-00000009"
    module.steps = 2  # gone back, then saved: what was asked for last is never what goes
    save(tmp_path, module, None, {}, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000009"]
    assert load(tmp_path / "step-00000002", module) == {}
    assert module.steps == 2
    assert load(tmp_path, module) == {"steps": 9}
    assert module.steps == 9


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    saved(tmp_path, 0)
    saved(tmp_path, 5)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000007"]
    module = alone()
    load(tmp_path, module)
    assert equal(assembled([module]), tensors(5))


def test_digest_is_the_networks_whatever_its_batch(tmp_path: Path) -> None:
    saved(tmp_path)
    assert len({model_digest(f(load_model("lenet5", b))) for f in (fuse, lambda g: g) for b in (4, 32)}) == 1
    load(tmp_path, alone(graph=fuse(load_model("mlp:4x3x2", 24))))
    with pytest.raises(LayerwiseError, match="same names and shapes, but other operators"):
        load(tmp_path, alone(graph=load_model("mlp:4x5x2", 8)))


KILLED = """
import os, sys
from pathlib import Path
from layerwise.checkpoint import load, save
from tests.run.cut_modules import assembled
from tests.checkpoint.test_checkpoint import alone, equal, tensors

def save_and_die(folder, steps, before):
    calls = 0
    def count(event, arguments):  # of all that the save does to files, call number `before` is not done any more
        nonlocal calls
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
            if calls == before:
                os._exit(9)
            calls += 1
    sys.addaudithook(count)
    save(folder, alone(1, steps), None, {"seed": 1}, keep=1)
    os._exit(0)

for steps in (7, 8):  # the step that is there already, and the next one
    folder, crashes, code = Path(sys.argv[1]) / str(steps), 0, 9
    save(folder, alone(0, 7), None, {"seed": 0})
    while code == 9:
        child = os.fork()
        if not child:
            save_and_die(folder, steps, crashes)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = alone(2)
        seed = load(folder, found)["seed"]
        assert equal(assembled([found]), tensors(seed)), f"after {crashes} calls"
        crashes += 1
    assert code == 0 and seed == 1 and [p.name for p in folder.iterdir()] == [f"step-{steps:08d}"]
    print(crashes)
"""


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Before each file operation of a save; what is loaded then is all old or all new."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert min(map(int, done.stdout.split())) > 8


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("where", ["write_tensors", "finish", "commit"])
def test_a_rank_that_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, rank: int) -> None:
    """All ranks hear of it, the checkpoint before is the latest, and nothing else is left."""
    before = trained(tmp_path, OPTIMIZERS["adam"], 3, 1, 1, torch.float32)
    module, name = {
        "write_tensors": (storage, "write_tensors"),
        "finish": (save_and_load, "finish"),
        "commit": (save_and_load, "commit"),
    }[where]
    real = getattr(module, name)

    def full(*args: Any) -> Any:
        if threading.current_thread().name == f"rank {rank}":
            if where == "write_tensors":
                args[0].write_bytes(b"half a fi")
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(module, name, full)

    def run(comm: ThreadComm) -> str:
        mine = CutModule(comm, tensors(1), cutting(tensors(1), 3, 9), steps=5)
        with pytest.raises(LayerwiseError) as error:
            save(tmp_path, mine, None, {})
        return str(error.value)

    if rank == 0 or where == "write_tensors":
        told = run_threads(3, run)
        assert set(told) == {
            f"no checkpoint was saved in {str(tmp_path)!r} (earlier ones are as they were): rank {rank}: "
            "No space left on device"
        }
        assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
        monkeypatch.undo()
        assert equal(assembled(resumed(tmp_path, OPTIMIZERS["adam"], 2, 2, 0, torch.float32)), assembled(before))
    else:  # the others have no part in it
        saved_by = run_threads(3, lambda comm: save(
            tmp_path, CutModule(comm, tensors(1), cutting(tensors(1), 3, 9), steps=5), None, {}))  # fmt: skip
        assert set(saved_by) == {tmp_path / "step-00000005"}


def test_a_bug_is_raised_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = storage.write_tensors

    def broken(*args: Any) -> str:
        if threading.current_thread().name == "rank 1":
            raise ZeroDivisionError("a bug")
        return real(*args)

    monkeypatch.setattr(storage, "write_tensors", broken)

    def run(comm: ThreadComm) -> type[BaseException]:
        with pytest.raises((LayerwiseError, ZeroDivisionError), match="a bug") as error:
            save(tmp_path, CutModule(comm, tensors(0), cutting(tensors(0), 2, 9)), None, {})
        return error.type

    assert run_threads(2, run) == [LayerwiseError, ZeroDivisionError]
    assert not list(tmp_path.iterdir())


def refused(folder: Path, module: CutModule | None = None, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Why it cannot be loaded; nothing has changed then."""
    module = module or alone(1)
    before = {name: tensor.detach().clone() for name, tensor in module.held.items()}
    with pytest.raises(LayerwiseError) as error:
        load(folder, module, optimizer)
    assert equal(dict(module.held), before)
    return str(error.value)


def test_no_checkpoint(tmp_path: Path) -> None:
    assert "there is no such folder" in refused(tmp_path / "none")
    assert "has no complete checkpoint" in refused(tmp_path)
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / ".step-00000004.tmp-12345678").mkdir()
    (tmp_path / ".step-00000004.tmp-12345678" / "checkpoint.json").write_text("{}")
    assert "has no complete checkpoint" in refused(tmp_path)
    assert "cannot be read" in refused(tmp_path / "nul\0")
    (tmp_path / "file").write_text("")
    assert "cannot be read: Not a directory" in refused(tmp_path / "file")


@settings(max_examples=60)
@given(st.data())
def test_damaged_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A bit flipped, bytes cut off or added, in any file."""
    folder = tmp_path_factory.mktemp("run")
    saved(folder, make=OPTIMIZERS["adam"])
    path = folder / "step-00000007" / data.draw(st.sampled_from(["checkpoint.json", "rank-00000.safetensors"]))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "add"]))
    if how == "flip":
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del content[at:]
    else:
        content[at:at] = b"0"
    try:
        harmless = json.loads(content) == json.loads(path.read_bytes())  # white space
    except ValueError:
        harmless = False
    path.write_bytes(content)
    module = alone(1)
    if harmless:
        load(folder, module)
    else:
        assert str(folder) in refused(folder, module, OPTIMIZERS["adam"](module.parameters()))


def test_file_that_is_gone(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "step-00000007" / "rank-00000.safetensors").unlink()
    assert "damaged or gone: No such file or directory" in refused(tmp_path)


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "checkpoint.json"])
def test_files_that_link_out_of_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    saved(tmp_path / "ck")
    folder = latest(tmp_path / "ck")
    assert folder is not None
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    assert f"{name}' is a link" in refused(folder)
    with pytest.raises(LayerwiseError, match="is a link, or no plain file"):
        export(tmp_path / "ck", tmp_path / "out.safetensors")


def test_a_pipe_in_the_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    saved(tmp_path / "ck")
    folder = latest(tmp_path / "ck")
    assert folder is not None
    (folder / "rank-00000.safetensors").unlink()
    os.mkfifo(folder / "rank-00000.safetensors")
    assert "no plain file" in refused(folder)


@pytest.mark.parametrize("name", ["step-00000007", "step-00000003", ".step-00000007.replaced"])
def test_step_folders_that_are_links_are_refused_and_stay(name: str, tmp_path: Path) -> None:
    """They used to be renamed to .step-N.tmp-..., and stayed so."""
    module = saved(tmp_path / "elsewhere")
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / name).symlink_to(tmp_path / "elsewhere" / "step-00000007")
    for attempt in (lambda: save(tmp_path / "ck", module, None, {}, keep=1), lambda: latest(tmp_path / "ck")):
        with pytest.raises(LayerwiseError, match=f"{name} is a link"):
            attempt()
    assert [path.name for path in (tmp_path / "ck").iterdir()] == [name]
    assert find(tmp_path / "elsewhere").is_dir()
    (tmp_path / "ck" / name).rename(tmp_path / "ck" / ".step-00000007.tmp-1f3a")  # as earlier versions left them
    save(tmp_path / "ck", module, None, {})
    assert [path.name for path in (tmp_path / "ck").iterdir()] == ["step-00000007"]
    assert find(tmp_path / "elsewhere" / "step-00000007").is_dir()


def forged(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Alters checkpoint.json, with a checksum that fits."""
    path = folder / "step-00000007" / "checkpoint.json"
    body = json.loads(path.read_text())
    del body["checksum"]
    change(body)
    path.write_text(json.dumps({**body, "checksum": storage._checksum(body)}))


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    """Not as a rank's file, whatever checkpoint.json says of it; not as checkpoint.json; not as DCP's own .metadata."""
    step, trap = tmp_path / "step-00000007", tmp_path / "sprung"
    content = pickle.dumps(Trap(trap))
    saved(tmp_path)
    (step / "rank-00000.safetensors").write_bytes(content)
    (step / ".metadata").write_bytes(content)
    assert "SHA-256" in refused(tmp_path)
    digest = hashlib.sha256(content).hexdigest()
    forged(tmp_path, lambda body: body["files"].update({"rank-00000.safetensors": digest}))
    assert "damaged" in refused(tmp_path)
    (step / "checkpoint.json").write_bytes(content)
    assert "not a text file" in refused(tmp_path)
    (step / "checkpoint.json").unlink()
    assert "no complete checkpoint" in refused(tmp_path)
    assert not trap.exists()
    pickle.loads(content)
    assert trap.exists()  # so it would have


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b.update(version=2), "version 2; this layerwise reads version 1"),
        (lambda b: b.update(format="other"), "not a layerwise checkpoint"),
        (lambda b: b.pop("format"), "not a layerwise checkpoint"),
        (lambda b: b.pop("files"), "makes no sense"),
        (lambda b: b.update(files=[]), "makes no sense"),
        (lambda b: b["files"].update({"../evil.safetensors": "0"}), "makes no sense"),
        (lambda b: b["tensors"].update(odd=3), "makes no sense"),
        (lambda b: b["tensors"]["scale"].update(dtype="object"), "makes no sense"),
        (lambda b: b["tensors"]["scale"]["chunks"][0].update(file="/etc/passwd"), "makes no sense"),
        (lambda b: b["tensors"]["conv.bias"]["chunks"].clear(), "0 of the 5 elements of 'conv.bias'"),
        (lambda b: b["tensors"]["conv.bias"]["chunks"][0].update(offsets=[-1]), "makes no sense"),
        (lambda b: b["tensors"]["conv.bias"]["chunks"][0].update(offsets=[1]), "outside its shape"),
        (lambda b: b["tensors"]["conv.bias"].update(shape=[2**70]), "5 of the 1180591620717411303424 elements"),
        (lambda b: b["tensors"]["conv.bias"]["chunks"][0].update(offsets=[]), "makes no sense"),
        (lambda b: b["about"].pop("steps"), "makes no sense"),
        (lambda b: b["about"].update(steps=-1), "makes no sense"),
        (lambda b: b["about"].update(progress=[]), "makes no sense"),
        (lambda b: b["about"].update(optimizer=3), "makes no sense"),
        (lambda b: b["about"]["optimizer"].update(groups=[{}]), "makes no sense"),
        (lambda b: b["about"]["optimizer"]["numbers"]["scale"].update(step={"dtype": "float32"}), "makes no sense"),
        (lambda b: b["about"]["optimizer"]["numbers"]["scale"]["step"].update(value="x"), "makes no sense"),
    ],
)
def test_forged_metadata(tmp_path: Path, change: Callable[[dict[str, Any]], object], reason: str) -> None:
    module = alone(0, 5)
    optimizer = OPTIMIZERS["adam"](module.parameters())
    train(module, optimizer, 2)
    save(tmp_path, module, optimizer, {})
    forged(tmp_path, change)
    assert reason in refused(tmp_path, module, optimizer)


def test_another_model(tmp_path: Path) -> None:
    saved(tmp_path)

    def other(name: str, tensor: Tensor | None, renamed: str | None = None) -> CutModule:
        whole = tensors(1)
        old = whole.pop(name)
        if tensor is not None or renamed:
            whole[renamed or name] = old if tensor is None else tensor
        return CutModule(SoloComm(), whole, cutting(whole, 1, 0))

    assert "it has 'scale', which this model lacks" in refused(tmp_path, other("scale", None))
    assert "no 'conv.weights' (did you mean 'conv.weight'?)" in refused(
        tmp_path, other("conv.weight", None, "conv.weights")
    )
    assert "'conv.bias' has shape [5] there, [6] here" in refused(tmp_path, other("conv.bias", torch.ones(6)))
    assert "'scale' in float32, it is float64 here" in refused(
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
    assert "has the state of Adam, the optimizer here is SGD" in reason("adam", torch.optim.SGD(parameters))
    assert "Adam has 1 groups of parameters, the one here 2" in reason("adam", groups)
    assert "no optimizer's state" in reason("none", torch.optim.Adam(parameters))
    assert "'conv.weight' is in group 0 of only one optimizer" in reason("some", torch.optim.Adam(parameters))
    assert "'conv.weight' is in group 0 of only one optimizer" in reason("adam", torch.optim.Adam(parameters[1:]))
    foreign = torch.optim.Adam([torch.nn.Parameter(torch.ones(2, 9))])
    assert "a parameter of shape (2, 9) that is not the module's" in reason("adam", foreign)
    load(tmp_path / "adam", module)  # the weights alone


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    module = alone()

    def reason(optimizer: torch.optim.Optimizer | None = None, progress: Any = None, **flags: Any) -> str:
        with pytest.raises(LayerwiseError) as error:
            save(tmp_path / "run", module, optimizer, progress or {}, **flags)
        assert not list(tmp_path.glob("run/*"))
        return str(error.value)

    shampoo = torch.optim.Adafactor(module.parameters())
    module.set_gradients(gradients(0))
    shampoo.step()
    assert "Adafactor keeps 'row_var' of 'conv.weight'" in reason(shampoo)
    newton = torch.optim.LBFGS(module.parameters())
    newton.step(lambda: torch.tensor(1.0))
    assert "LBFGS keeps" in reason(newton)
    assert "'progress' must be what JSON can hold" in reason(progress={"x": {1, 2}})
    assert "'progress' must be what JSON can hold" in reason(progress={"x": float("nan")})
    assert "keep at least 1" in reason(keep=0)
    strange = torch.optim.SGD(module.parameters())
    strange.param_groups[0]["schedule"] = object()
    assert "SGD's setting 'schedule' is a object" in reason(strange)
    taken = {"optimizer/exp_avg/x": torch.ones(2)}
    module = CutModule(SoloComm(), taken, cutting(taken, 1, 0))
    assert "'optimizer/exp_avg/x' cannot be saved" in reason()
    complex_ = {"x": torch.ones(2, dtype=torch.complex64)}
    module = CutModule(SoloComm(), complex_, cutting(complex_, 1, 0))
    assert "cannot hold 'x@0' of torch.complex64" in reason()
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
        module.steps += 1
        return optimizer

    def unequal(module: CutModule, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for state in optimizer.state.values():
            state["step"] += 1
        return optimizer

    def forgotten(module: CutModule, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.state.clear()
        return optimizer

    assert "rank 1 and rank 0 differ in optimizer or settings" in told(rate)
    assert "rank 1 gave no optimizer, others did" in told(lambda *_: None)
    assert "different numbers of steps: [1, 2]" in told(ahead)
    assert "state of" in told(unequal)
    assert "elements of 'optimizer/exp_avg" in told(forgotten)


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


def test_torchs_own_save_and_load_take_the_storage(tmp_path: Path) -> None:
    """Writer and Reader are torch.distributed.checkpoint's: a program without layerwise can use them."""
    before = trained(tmp_path, OPTIMIZERS["adam"], 3, 4, 1, torch.float32)
    found: dict[str, Tensor] = {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}
    dcp.load(found, storage_reader=storage.Reader(tmp_path / "step-00000001"), no_dist=True)
    assert equal(found, assembled(before))
    dcp.save(found, storage_writer=storage.Writer(tmp_path / "own", 0), no_dist=True)
    again = {name: torch.zeros_like(tensor) for name, tensor in found.items()}
    dcp.load(again, storage_reader=storage.Reader(tmp_path / "own"), no_dist=True)
    assert equal(again, found)
    with pytest.raises(dcp.api.CheckpointException, match="a checkpoint holds tensors; 'epoch' is none"):
        dcp.save({"epoch": 3}, storage_writer=storage.Writer(tmp_path / "own", 0), no_dist=True)


def test_every_element_type(tmp_path: Path) -> None:
    """Empty, odd and 0-dimensional ones, as safetensors itself reads them; no other type is let through."""
    whole = {}
    for dtype in tensorfile.DTYPES:
        for shape in ((), (3,), (0, 2), (2, 3, 1)):
            bits = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
            whole[f"{dtype} {shape}"] = bits.view(dtype).reshape(shape)
    path = tmp_path / "all.safetensors"
    specs = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in whole.items()}
    digest = tensorfile.write_tensors(path, specs, lambda name: whole[name])
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    found = load_file(path)
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.items()} == specs
    for name, tensor in whole.items():
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    with pytest.raises(LayerwiseError, match="__metadata__"):
        tensorfile.write_tensors(path, {"__metadata__": ((), torch.bool)}, lambda name: torch.tensor(True))


def test_layouts_other_than_contiguous(tmp_path: Path) -> None:
    """A parameter in channels_last, and a buffer that is a view of something larger."""
    module = alone()
    nhwc = torch.randn(5, 3, 2, 3).contiguous(memory_format=torch.channels_last)
    module.held["conv.weight"], module.held["mask"] = torch.nn.Parameter(nhwc), torch.ones(5, 9).bool().T[::3]
    save(tmp_path, module, None, {})
    other = alone(1)
    load(tmp_path, other)
    assert torch.equal(other.held["conv.weight"], nhwc)
    load(tmp_path, module)
    assert module.held["conv.weight"].is_contiguous(memory_format=torch.channels_last)
    assert module.held["mask"].all()


def test_a_pipe_in_the_place_of_a_step_is_refused_and_no_save_waits_for_it(tmp_path: Path) -> None:
    whole = tensors(0)
    module = CutModule(SoloComm(), whole, cutting(whole, 1, 0), 7)
    os.mkfifo(tmp_path / ".step-00000003.tmp-12ab34cd")
    save(tmp_path, module, None, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    os.mkfifo(tmp_path / "step-00000003")
    with pytest.raises(LayerwiseError, match="step-00000003 is no folder: put the folder itself in its place, or remo"):
        save(tmp_path, module, None, {})
    assert (tmp_path / "step-00000003").is_fifo()
