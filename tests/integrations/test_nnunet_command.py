"""python -m layerwise.integrations.nnunet, where nnU-Net need not be installed."""

from pathlib import Path

import pytest

from layerwise.errors import LayerwiseError
from layerwise.integrations.nnunet import __main__ as command


def test_the_folder_of_trainers_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    assert Path(capsys.readouterr().out.strip()).is_dir()


def test_a_mistake_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    with pytest.raises(LayerwiseError, match="pip install nnunetv2"):
        command.main(["plan", "-d", "4", "--gpus", "8"])
    with pytest.raises(LayerwiseError, match="'plann' is not known here"):
        command.main(["plann"])
