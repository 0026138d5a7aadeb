"""layerwise predict: search, then ranks, then labels in a folder, as a user types it (torchrun: tests/train)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from layerwise.models import find
from safetensors.torch import save_file

from layerwise.__main__ import dispatch
from layerwise.cli import run_main
from tests.comm.launch import launch

FLAGS = "--profile cpu --inference --io boxes --global-batch 1"
SMALL = "tests.inference.test_command:small"


def small() -> torch.nn.Module:
    """A tenth of the built-in one's channels: a rank traces it in a second."""
    torch.manual_seed(0)
    return find("unet3d").build(width=0.1).eval()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_from_a_plan_to_labels() -> None:
    search = f"search {SMALL} --input-shape 1x16x16x16 {FLAGS} --gpus 2 --gpus-per-node 2 --out plan.json"
    assert run_main(dispatch, search.split()) == 0
    network = small()
    save_file(network.state_dict(), "model.safetensors")
    rng = np.random.default_rng(0)
    volumes = {name: rng.normal(size=(1, 1, *shape)) for name, shape in (("a", (16, 24, 16)), ("b", (24, 13, 16)))}
    for name, volume in volumes.items():
        np.save(f"{name}.npy", volume[0].astype(np.float32))
    command = "-m layerwise.predict plan.json --weights model.safetensors --out labels --reduce argmax --json"
    done = launch([*command.split(), "--model", SMALL, "--data", "a.npy", "b.npy"])
    assert done.codes == [0, 0], done.stderr
    assert json.loads(done.stdout[0])["written"] == ["a", "b"]
    for name, volume in volumes.items():
        rest = [-n % 8 for n in volume.shape[2:]]
        padded = np.pad(volume[0, 0], [(r // 2, r - r // 2) for r in rest]).astype(np.float32)
        with torch.no_grad():
            logits = network(torch.from_numpy(padded)[None, None])[0].numpy()
        inside = tuple(slice(r // 2, r // 2 + n) for r, n in zip(rest, volume.shape[2:], strict=True))
        assert np.array_equal(np.load(f"labels/{name}.npy"), logits.argmax(0)[inside])


def test_one_line_for_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(dispatch, f"search unet3d:16 {FLAGS} --gpus 1 --out plan.json".split()) == 0
    save_file(find("unet3d:16").build().state_dict(), "model.safetensors")
    np.save("a.npy", np.zeros((1, 16, 16, 16), np.float32))
    capsys.readouterr()
    usual = {"--weights": "model.safetensors", "--data": "a.npy", "--out": "labels"}
    wrong = {
        "no such file": {"--weights": "none.safetensors"},
        "does not exist": {"--data": "none.npy"},
        "'4x' is not sizes joined by x": {"--window": "4x"},
        "overlap is 1.0; it must be at least 0, below 1": {"--overlap": "1"},
    }
    for said, flags in wrong.items():
        arguments = [part for pair in (usual | flags).items() for part in pair]
        assert run_main(dispatch, ["predict", "plan.json", *arguments]) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert told.startswith("layerwise: error: ")
        assert said.lower() in told.lower()
        assert not Path("labels").exists() or not list(Path("labels").iterdir())
