"""layerwise completion: what bash completes with the script that it prints."""

import subprocess
import sys
from pathlib import Path

import pytest

from layerwise.__main__ import COMMANDS
from tests.cli.commands import Run

COMPLETE = """
source completion.bash
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_shtab_layerwise
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_bash_completes_commands_flags_choices_and_files(run: Run, here: Path) -> None:
    pytest.importorskip("shtab")
    (here / "completion.bash").write_text(run("completion", "bash"))
    (here / "plan.json").touch()

    def completed(*words: str) -> set[str]:
        command = ["bash", "-c", COMPLETE, "bash", "layerwise", *words]
        return {*subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()}

    assert completed("") >= {*COMMANDS}
    assert completed("search", "--gpu") >= {"--gpu", "--gpus", "--gpus-per-node"}
    assert completed("search", "--optimizer", "m") == {"momentum"}
    assert completed("measure", "li") == {"links"}
    assert completed("run", "pl") == {"plan.json"}
    assert completed("search", "resnet1") == {"resnet18", "resnet152"}
    assert completed("fits", "vgg16", "--gpu", "a100-8") >= {"a100-80"}


def test_zsh_and_a_missing_library(run: Run, refuse: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "zsh" in refuse("completion", "fish")
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "pip install 'layerwise[completion]'" in refuse("completion", "zsh")
    monkeypatch.undo()
    pytest.importorskip("shtab")
    assert run("completion", "zsh").startswith("#compdef layerwise")
