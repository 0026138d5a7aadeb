"""save: the file that one device's script has written, whatever the ranks and their plan."""

from pathlib import Path

import pytest
import torch

import layerwise
from layerwise.errors import LayerwiseError
from tests.api.script import data, network
from tests.comm.pool import run_ranks


def test_the_whole_state_in_one_file(tmp_path: Path) -> None:
    for state, message in run_ranks(2, "tests.api.ranks:saved", str(tmp_path / "model.pt")):
        found = torch.load(tmp_path / "model.pt", weights_only=True)
        assert all(torch.equal(found[name], value) for name, value in state.items())
        network().load_state_dict(found, strict=True)
        assert "below.pt' cannot be written" in message
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_of_a_model_that_fit_has_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    layerwise.fit(model, data(16).tensors, torch.nn.CrossEntropyLoss(), "sgd")
    layerwise.save(model, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    with pytest.raises(LayerwiseError, match="model is of type OrderedDict; it must be a Module"):
        layerwise.save(model.state_dict(), tmp_path / "model.pt")
    with pytest.raises(LayerwiseError, match="file is None; it must be a text or a path"):
        layerwise.save(model, None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LayerwiseError, match="the model is not parallel: give save what"):
        layerwise.save(model, tmp_path / "model.pt")
