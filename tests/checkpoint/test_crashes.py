"""Crashes while a checkpoint is saved do no harm: the one before stays, or the new one is whole."""

import errno
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from layerwise.api.save import save as api_save
from layerwise.checkpoint import save, save_and_load, shards
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from tests.checkpoint.runs import OPTIMIZERS, alone, equal, resumed, trained
from tests.comm.launch import launch
from tests.comm.thread import ThreadComm, run_threads
from tests.run.cut_modules import CutModule, assembled, cutting, tensors

KILLED = """
import os, sys
from pathlib import Path
from layerwise.checkpoint import load, save
from tests.run.cut_modules import assembled
from tests.checkpoint.runs import alone, equal
from tests.run.cut_modules import tensors

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
    (tmp_path / "killed.py").write_text(KILLED)
    done = launch([str(tmp_path / "killed.py"), str(tmp_path)], ranks=1)
    assert done.codes == [0], done.stderr
    assert min(map(int, done.stdout[0].split())) > 8


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("where", ["write_tensors", "seal", "commit"])
def test_a_rank_that_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, rank: int) -> None:
    """All ranks hear of it, the checkpoint before is the latest, and nothing else is left."""
    before = trained(tmp_path, OPTIMIZERS["adam"], 3, 1, 1, torch.float32)
    module, name = {
        "write_tensors": (shards, "write_tensors"),
        "seal": (save_and_load, "seal"),
        "commit": (save_and_load, "commit"),
    }[where]
    real = getattr(module, name)

    def full(*args: Any) -> Any:
        thread, file = threading.current_thread().name, f"rank-{rank:05d}.safetensors"
        if args[0].name == file if where == "write_tensors" else thread == f"rank {rank}":
            if where == "write_tensors":
                args[0].write_bytes(b"half a fi")
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(module, name, full)

    def run(comm: ThreadComm) -> str:
        mine = CutModule(comm, tensors(1), cutting(tensors(1), 3, 9), steps_done=5)
        with pytest.raises(LayerwiseError) as error:
            save(tmp_path, mine, None, {})
        return str(error.value)

    if rank == 0 or where == "write_tensors":
        told = run_threads(3, run)
        assert set(told) == {
            f"no checkpoint was saved in {str(tmp_path)!r} (earlier ones are unchanged): rank {rank}: "
            "No space left on device"
        }
        assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
        monkeypatch.undo()
        assert equal(assembled(resumed(tmp_path, OPTIMIZERS["adam"], 2, 2, 0, torch.float32)), assembled(before))
    else:  # the others have no part in it
        saved_by = run_threads(3, lambda comm: save(
            tmp_path, CutModule(comm, tensors(1), cutting(tensors(1), 3, 9), steps_done=5), None, {}))  # fmt: skip
        assert set(saved_by) == {tmp_path / "step-00000005"}


def test_a_disk_that_fills_while_pytorch_writes_is_one_sentence(tmp_path: Path) -> None:
    """Of a checkpoint, and in the midst of torch.save, whose own writer raises another error then."""
    module = CutModule(SoloComm(), {"w": torch.zeros(50_000)}, {"w": (Box((0,), (50_000,)),)}, steps_done=5)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(LayerwiseError, match=r"no checkpoint was saved in .*: File too large"):
            save(tmp_path, module, None, {})
        with pytest.raises(LayerwiseError, match=r"model.pt' cannot be written: File too large"):
            api_save(nn.Linear(500, 100), tmp_path / "model.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_what_is_left_of_a_crash_goes_and_what_another_run_writes_stays(tmp_path: Path) -> None:
    for step in (4, 5, 6):
        (tmp_path / f".step-{step:08d}.tmp-12345678").mkdir(parents=True)
    save(tmp_path, alone(0, 5), None, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step-00000006.tmp-12345678", "step-00000005"]


def test_a_bug_is_raised_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shards.write_tensors

    def broken(path: Path, *args: Any) -> str:
        if path.name == "rank-00001.safetensors":
            raise ZeroDivisionError("a bug")
        return real(path, *args)

    monkeypatch.setattr(shards, "write_tensors", broken)

    def run(comm: ThreadComm) -> type[BaseException]:
        with pytest.raises((LayerwiseError, ZeroDivisionError), match="a bug") as error:
            save(tmp_path, CutModule(comm, tensors(0), cutting(tensors(0), 2, 9)), None, {})
        return error.type

    assert run_threads(2, run) == [LayerwiseError, ZeroDivisionError]
    assert not list(tmp_path.iterdir())
