"""The scripts of examples/, as a reader runs them: on one process, and on two with the same numbers."""

import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.comm.launch import launch

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LEARNING = [path for path in EXAMPLES if path.name != "decode_video.py"]
ZOO = Path(sys.prefix) / "zoo"  # where `make zoo` puts packages
NEEDS = {
    "decode_video.py": ["diffusers"],
    "segment_nnunet.py": ["nnunetv2"],
    "train_accelerate.py": ["accelerate"],
    "train_lightning.py": ["lightning"],
    "train_monai.py": ["monai", "ignite"],
    "train_transformers.py": ["accelerate"],
}
LOSS = re.compile(r"loss (?:of its own texts )?(\d+\.\d+)")


def losses(said: str) -> list[float]:
    return [float(value) for value in LOSS.findall(said)]


def wrapped(name: str, folder: Path) -> str:
    """A script that runs an example with what it needs of the zoo; the test is skipped where that is not installed."""
    for package in NEEDS.get(name, ()):
        if (ZOO / package).is_dir():  # this package alone: others would be taken for the environment's
            (folder / package).symlink_to(ZOO / package)
        elif find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    script, example = folder / "run.py", str(ROOT / "examples" / name)
    found = f"import runpy, sys; sys.path.insert(0, {str(folder)!r})"
    script.write_text(f"{found}; runpy.run_path({example!r}, None, '__main__')")
    return str(script)


SAID = dict[tuple[str, ...], str]()


def alone(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What an example says on one process; here, for a process of its own would import torch once more. Run once."""
    if (name, *flags) in SAID:
        return SAID[name, *flags]
    monkeypatch.setattr(sys, "argv", [name, *flags])
    try:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    return SAID.setdefault((name, *flags), capsys.readouterr().out)


@pytest.mark.parametrize("path", LEARNING, ids=lambda path: path.name)
def test_an_example_learns_on_one_process(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wrapped(path.name, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = losses(alone(path.name, monkeypatch, capsys))
    assert len(found) >= 3
    assert found[-1] < found[0]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_hides_no_package(path: Path) -> None:
    """Python puts a script's folder first: examples/onnx.py would be imported in the place of onnx."""
    assert len(path.read_text(encoding="utf-8").splitlines()) < 70
    assert path.stem not in ("onnx", "torch", "transformers", "layerwise")


def test_the_weights_of_fit_are_the_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    alone("fit.py", monkeypatch, capsys, "--epochs", "1", "--out", str(tmp_path / "model.pt"))
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert state["0.weight"].shape == (8, 1, 3, 3)


def test_the_swapped_line_has_the_losses_of_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    done = launch(["examples/ddp_swap.py"])
    assert done.codes == [0, 0], done.stderr
    assert "Sequential on 2 × cpu" in done.stdout[0]
    both = [losses(said) for said in done.stdout if said]
    assert both == [pytest.approx(losses(alone("ddp_swap.py", monkeypatch, capsys)), abs=2e-4)]


@pytest.mark.parametrize("name", [name for name in NEEDS if name.startswith("train_")])
def test_other_tools_have_the_losses_of_one_process(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = wrapped(name, tmp_path)
    done = launch([script])
    assert done.codes == [0, 0], done.stderr
    monkeypatch.syspath_prepend(str(tmp_path))
    both = losses("".join(done.stdout))
    assert both == pytest.approx(losses(alone(name, monkeypatch, capsys)), abs=2e-4)


def test_volumes_have_the_losses_and_the_dice_of_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--steps", "2", "--extent", "16")
    done = launch(["examples/segment_volume.py", *flags])
    assert done.codes == [0, 0], done.stderr
    wanted = alone("segment_volume.py", monkeypatch, capsys, *flags)
    assert losses(done.stdout[0]) == pytest.approx(losses(wanted), abs=2e-4)
    assert held_out(done.stdout[0]) == pytest.approx(held_out(wanted), abs=2e-3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_decoded_video_is_one_devices(ranks: int, tmp_path: Path) -> None:
    done = launch([wrapped("decode_video.py", tmp_path)], ranks)
    assert done.codes == [0] * ranks, done.stderr
    split, difference = re.findall(r": (\d+) layers are split; difference (\S+)", done.stdout[0])[0]
    assert (int(split) > 10) == (ranks > 1)
    assert float(difference) <= 1e-9


def held_out(said: str) -> list[float]:
    return [float(value) for value in re.findall(r"matter (\d\.\d+)", said)]


def test_what_one_rank_reads_wrong_ends_all(tmp_path: Path) -> None:
    """The other is told at once, in its own line, and does not wait for what never comes."""
    script = tmp_path / "one.py"
    lines = [
        "import torch, layerwise",
        "from layerwise.cli import run_main",
        "def main(_):",
        "    options = layerwise.ParallelOptions(measure_s=0)",
        "    model = layerwise.parallelize(torch.nn.Linear(4, 4), torch.empty(2, 4), options=options)",
        "    if model.comm.rank == 1: raise layerwise.LayerwiseError('no file 7')",
        "    model.comm.barrier()",
        "raise SystemExit(run_main(main))",
    ]
    script.write_text("\n".join(lines))
    done = launch([str(script)])
    assert done.codes == [2, 2], done.stderr
    assert "Traceback" not in "".join(done.stderr)
    assert "layerwise: error: no file 7" in done.stderr[1]
    assert "layerwise: error: rank 1" in done.stderr[0]
    assert "no file 7" in done.stderr[0]
