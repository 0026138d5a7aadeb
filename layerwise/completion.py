"""layerwise completion bash: a script by which a shell completes commands, flags, their choices and files."""

from __future__ import annotations

import argparse
import importlib
import sys

from layerwise.__main__ import COMMANDS
from layerwise.cli import Parser, command, run_main
from layerwise.errors import LayerwiseError
from layerwise.machine import names
from layerwise.machine.catalogue import devices
from layerwise.models import names as model_names

WORDS = {"model": "_layerwise_models", "profile": "_layerwise_machines"}  # shell functions, by the argument
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


@command(parser)
def main(args: argparse.Namespace) -> None:
    """Prints the script. LayerwiseError: shtab is not installed."""
    try:
        import shtab
    except ImportError:
        raise LayerwiseError("completion needs shtab: pip install 'layerwise[completion]'") from None
    root = argparse.ArgumentParser("layerwise")
    commands = root.add_subparsers()
    for name, (module, summary) in COMMANDS.items():
        of_command = importlib.import_module(module).parser()
        for action in of_command._actions:
            if action.nargs != 0 and not action.choices:
                words = WORDS.get(action.dest)
                action.complete = shtab.FILE if words is None else dict.fromkeys(("bash", "zsh"), words)
        of_command.description = summary
        commands.add_parser(name, help=summary)
        commands.choices[name] = of_command
    print(shtab.complete(root, args.shell, preamble=_functions()))


def _functions() -> dict[str, str]:
    """Shell functions that complete the names of models, or of machines, and files, by shell."""
    lists = {"model": model_names(), "profile": [*names(), *devices()]}
    bash = [f"{WORDS[dest]}() {{ compgen -W '{' '.join(of)}' -- $1; compgen -f -- $1; }}" for dest, of in lists.items()]
    zsh = [f"{WORDS[dest]}() {{ compadd -- {' '.join(of)}; _files; }}" for dest, of in lists.items()]
    return {"bash": "\n".join(bash), "zsh": "\n".join(zsh)}


if __name__ == "__main__":
    sys.exit(run_main(main))
