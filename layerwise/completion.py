"""layerwise completion bash: a script by which a shell completes commands, flags, their choices and files."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from layerwise.__main__ import COMMANDS
from layerwise.cli import Parser, run_main
from layerwise.errors import LayerwiseError

EPILOG = """examples:
  layerwise completion bash > \\
    ~/.local/share/bash-completion/completions/layerwise
  layerwise completion zsh > ~/.zfunc/_layerwise  # a folder of zsh's fpath"""


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = Parser(
        prog="layerwise completion",
        description="Prints a script by which a shell completes what follows `layerwise`.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("shell", choices=["bash", "zsh"])
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    args = parser().parse_args(argv)
    try:
        import shtab
    except ImportError:
        raise LayerwiseError("completion needs shtab: pip install 'layerwise[completion]'") from None
    root = argparse.ArgumentParser("layerwise")
    commands = root.add_subparsers()
    for name, (module, summary) in COMMANDS.items():
        command = importlib.import_module(module).parser()
        for action in command._actions:
            if action.nargs != 0 and not action.choices:
                action.complete = shtab.FILE
        command.description = summary
        commands.add_parser(name, help=summary)
        commands.choices[name] = command
    print(shtab.complete(root, args.shell))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
