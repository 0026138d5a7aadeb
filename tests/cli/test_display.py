"""The command lines as people see them: help, tables, pipes and terminals."""

import argparse
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from rich.cells import cell_len

from layerwise.__main__ import COMMANDS, dispatch
from layerwise.cli import PIPED_WIDTH, run_main
from layerwise.plan import load_plan
from layerwise.quantities import units
from layerwise.search.report.tables import broken
from tests.cli.commands import LENET, MLP, Run, onnx_file
from tests.report.page import Page


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("columns", [80, 120])
def test_help(command: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit, match="0"):
        run_main(dispatch, (command, "--help"))
    out, err = capsys.readouterr()
    assert out.startswith(f"usage: layerwise {command}")
    assert err == ""
    assert max(map(cell_len, out.splitlines())) <= columns


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_a_dozen_flags_and_help_all_every_one(command: str) -> None:
    parser = import_module(COMMANDS[command][0]).parser()
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for one in (parser, *(part for action in below for part in action.choices.values())):
        every = [action.option_strings for action in one._actions if action.option_strings]
        shown, full = (
            set(re.findall(r"^  (--?[\w-]+)", text, re.MULTILINE)) for text in (one.format_help(), one.full_help())
        )
        assert len(shown - {"-h", "--help-all"}) <= 12
        assert shown <= full == {flags[0] for flags in every}
        assert one.main_flags <= {flag for flags in every for flag in flags}


def test_overview(run: Run) -> None:
    for argv in ((), ("-h",), ("--help",)):
        assert all(command in run(*argv) for command in COMMANDS)
    assert run("--version").startswith("layerwise 0.")


@pytest.mark.parametrize(
    ("columns", "flags"),
    [
        (80, "--global-batch 2 --dims n,c,h,w,k"),
        (80, "--layers"),
        (100, ""),
        (140, "--layers"),
        (None, "--global-batch 2 --dims n,c,h,w,k"),
    ],
)
def test_tables_fit(run: Run, columns: int | None, flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    lines = run(*LENET, "--profile", "pcie", "--gpus", "16", *flags.split()).splitlines()
    assert max(map(cell_len, lines)) <= (columns or PIPED_WIDTH)
    heads = [i for i, line in enumerate(lines) if line.startswith(("layers", "strategy"))]
    assert len(heads) == 2
    assert [lines[heads[1] + 1 + i].split()[0] for i in range(3)][-2:] in (["data", "model"], ["model", "owt"])
    text = "\n".join(lines)
    for whole in ("configuration", "devices", "t_X in", "samples/s", "features.0", "optimal: proven."):
        assert whole in text
    assert ("conv+tanh" in text) or columns != 140  # what layers are made of is left out first
    assert columns not in (80, None) or "conv+tanh" not in text
    for line in lines[heads[0] + 1 : heads[1] - 1]:  # no configuration is cut in two
        assert line.count("{") == line.count("}")


def test_names_do_nothing_to_a_terminal(run: Run, refuse: Run, here: Path) -> None:
    """Of layers, of ONNX nodes, and of files: escape codes, what turns a line around, halves of characters."""
    odd = "\x1b[31m\x9b2J\r\u202e"
    onnx_file(here / "odd.onnx", "Relu", ["batch", 8], name=f"node{odd}")
    run("search", "odd.onnx", "--gpus", "2", "--out", "p.json")
    plan = load_plan("p.json")
    (config,) = {str(c): c for c in plan.strategy.values()}.values()
    replace(plan, model=f"m{odd}", strategy={f"x{odd}": config, **plan.strategy}).save("q.json")
    shown = run("search", "odd.onnx", "--gpus", "2", "--layers") + refuse("explain", "q.json", "none")
    assert r"x\x1b[31m\x9b2J\r\u202e" in shown
    assert not set(odd[0] + odd[5:6] + odd[-2:]) & set(shown)
    (here / "bad.json").write_text(plan.dumps().replace('"io": "', '"io": "\\ud800\\u001b[2J'))
    said = refuse("explain", "bad.json", "none")
    assert r"\ud800\x1b[2J" in said
    assert not set("\ud800\x1b") & set(said)


def test_names_are_not_markup(run: Run, here: Path) -> None:
    (here / "[bold]").mkdir()
    onnx_file(here / "[bold]" / "[red].onnx", "Relu", ["batch", 8])
    shown = run("search", "[bold]/[red].onnx", "--gpus", "2", "--out", "[x].json")
    assert shown.startswith("[bold]/[red].onnx on 2 × ")
    assert "plan written to [x].json" in shown


def test_broken() -> None:
    assert broken("Mixed_7c.branch3x3dbl_3a.conv") == "Mixed_7c.\nbranch3x3dbl_3a.\nconv"
    assert broken("features.0") == "features.0"
    assert broken("") == ""
    assert broken("x" * 40) == "x" * 40


def test_units() -> None:
    seconds = (0, 1.5e-9, 2.2e-2, 0.9996e-3, 1, 999.6e-6, 1234)
    assert [units(x, "s") for x in seconds] == ["0 s", "0.0015 µs", "22.0 ms", "1.00 ms", "1.00 s", "1.00 ms", "1234 s"]
    assert [units(x, "B") for x in (1, 16000, 999_600, 1.5e15)] == ["1.00 B", "16.0 kB", "1.00 MB", "1500 TB"]


def test_broken_pipe() -> None:
    """Of a process each, forked from one that has imported what they need."""
    script = "import sys, os\nfrom layerwise.cli import console, run_main\n"
    for code in ("sys.stdout.write('x' * 10**6)", "print('x')", "console().print('x\\n' * 10**5)"):
        script += f"if not (child := os.fork()):\n    sys.exit(run_main(lambda _: {code}))\n"
        script += f"assert os.waitpid(child, 0)[1] == 0, {code!r}\n"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_ascii_terminal_and_exit_code() -> None:
    script = "from layerwise.cli import run_main\nimport sys\nsys.exit(run_main(lambda _: print('×') or 3))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"\\xd7\n", b"")


def test_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    def main(_: object) -> int:
        raise KeyboardInterrupt

    assert run_main(main) == 130
    assert capsys.readouterr().err == "layerwise: interrupted\n"


@pytest.mark.parametrize(
    "command",
    [
        (*MLP, "--memory"),
        (*MLP, "--price", "data"),
        ("explain", "p.json", "0"),
        ("oracle", "lenet5", "--gpus", "1..4", "--profile", "v100"),
    ],
    ids=lambda command: command[0],
)
def test_pages_say_what_terminals_do(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Every quantity; and the picture of the plan, where there is one."""
    monkeypatch.setenv("COLUMNS", "200")
    run(*MLP, "--out", "p.json")
    said = run(*command, "--html", "out.html")
    assert said.rstrip().endswith("page written to out.html")
    source = (here / "out.html").read_text(encoding="utf-8")
    found = Page(source)
    words = " ".join(data for _, data in found.texts)
    numbers = set(re.findall(r"\d[\d.,]* (?:[mµ]?s|[kMG]?B)\b", said.replace("\n", " ")))
    assert numbers <= set(re.findall(r"\d[\d.,]* (?:[mµ]?s|[kMG]?B)\b", words))
    assert ("<svg" in source) == (command[0] == "search")
    assert found.loaded == []
