"""One run at a time writes into a folder of checkpoints; what a killed run has left blocks nobody."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from layerwise.__main__ import dispatch
from layerwise.checkpoint import save, step_folders
from layerwise.checkpoint.step_folders import MARK, sole_writer
from layerwise.cli import run_main
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from tests.comm.pool import context
from tests.run.cut_modules import CutModule, cutting, tensors
from tests.run.small_plans import plan


def hold(folder: Path, held: Connection) -> None:
    """What another run does."""
    os.setsid()
    with sole_writer(folder):
        if not os.fork():  # as a data loader's worker
            time.sleep(60)
            os._exit(0)
        held.send("held")
        time.sleep(60)


@contextmanager
def another_run(folder: Path) -> Iterator[ForkServerProcess]:
    """A process that writes into the folder, with a worker."""
    here, there = context().Pipe()
    process = context().Process(target=hold, args=(folder, there), daemon=True)
    process.start()
    there.close()
    assert process.pid is not None
    try:
        assert here.recv() == "held"
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()


def test_two_runs_into_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan("mlp:64x12x10", 8, 1).save("one.json")
    flags = ["run", "one.json", "--steps", "1", "--checkpoint", "ck"]
    with another_run(tmp_path / "ck") as other:
        assert run_main(dispatch, flags) == 2
        out, err = capsys.readouterr()
        told = f"another run is writing checkpoints into 'ck' (process {other.pid} on "
        assert err.startswith(f"layerwise: error: {told}")
        assert (out, err.count("\n")) == ("", 1)
        other.kill()  # its worker lives on
        other.join()
        assert (tmp_path / "ck" / MARK).exists()
        assert run_main(dispatch, flags) == 0
    assert [path.name for path in (tmp_path / "ck").iterdir()] == ["step-00000001"]


def test_a_restart_waits_for_the_run_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whose ranks may be about to end; for so long at most."""
    with another_run(tmp_path) as other:
        with pytest.raises(LayerwiseError, match="another run is writing"), sole_writer(tmp_path, 0.3):
            pass
        assert capsys.readouterr().err.endswith(
            f"(process {other.pid} on {os.uname().nodename}): waiting up to 0 s for it to end\n"
        )
        threading.Timer(0.3, other.kill).start()
        began = time.monotonic()
        with sole_writer(tmp_path, 60):
            assert time.monotonic() - began > 0.3
            other.join(10)  # it may be on its way out still
            assert other.exitcode == -signal.SIGKILL


def test_the_folder_is_free_afterwards_and_nothing_is_left(tmp_path: Path) -> None:
    with sole_writer(tmp_path / "a" / "b"), sole_writer(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / MARK).read_text().startswith(f"process {os.getpid()} on ")
    assert not (tmp_path / "a").exists()
    with sole_writer(tmp_path / "a"), pytest.raises(RuntimeError), sole_writer(tmp_path / "b"):
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_a_mark_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / MARK).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"), sole_writer(tmp_path / "ck"):
        pass
    assert not (tmp_path / "precious").exists()


def test_saving_where_another_run_saves(tmp_path: Path) -> None:
    whole = tensors(0)
    module = CutModule(SoloComm(), whole, cutting(whole, 1, 0), 7)
    with (
        another_run(tmp_path),
        pytest.raises(LayerwiseError, match=r"no checkpoint was saved .*: another run is writing"),
    ):
        save(tmp_path, module, None, {})
    assert [path.name for path in tmp_path.iterdir()] == [MARK]
    save(tmp_path, module, None, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_a_folder_that_the_run_before_has_removed_meanwhile(tmp_path: Path) -> None:
    lock = step_folders._lock(tmp_path / "gone" / MARK, "gone", 0.0)
    assert (tmp_path / "gone" / MARK).exists()
    os.close(lock)
