"""layerwise COMMAND ...: the same as python -m layerwise COMMAND ..."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from layerwise.errors import LayerwiseError, nearest
from layerwise.version import __version__

COMMANDS = {
    "search": ("layerwise.search.__main__", "find the cheapest way to split every layer, and prove it"),
    "fits": ("layerwise.commands.fits", "whether a model fits, on how many GPUs, how large a batch"),
    "explain": ("layerwise.commands.explain", "why a layer of a plan has its configuration"),
    "report": ("layerwise.report.__main__", "a plan as a page to look at, and what was measured beside it"),
    "oracle": ("layerwise.oracle.__main__", "what every parallel strategy would cost, and which to take"),
    "measure": ("layerwise.measure.__main__", "times of layers and links on this machine, into a profile"),
    "run": ("layerwise.commands.run", "train a planned network; torchrun starts one process a GPU"),
    "predict": ("layerwise.inference.command", "a planned network's answers for volumes; under torchrun"),
    "machines": ("layerwise.commands.machines", "the devices and networks that --gpu and --link name"),
    "doctor": ("layerwise.commands.doctor", "whether what a training needs works here: devices, backends, two ranks"),
    "export": ("layerwise.commands.export", "make one safetensors file of a checkpoint, for the original model"),
}

USAGE = "\n".join(
    [
        "usage: layerwise COMMAND ...",
        "",
        *(f"  {name:12s}{summary}" for name, (_, summary) in COMMANDS.items()),
        "",
        "layerwise COMMAND --help tells more; python -m layerwise COMMAND is the same.",
    ]
)


def dispatch(argv: Sequence[str] | None) -> int:
    """Hands the rest of the line to the command's own main."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if arguments[0] == "--version":
        print(f"layerwise {__version__}")
        return 0
    if arguments[0] not in COMMANDS:
        near = nearest(arguments[0], COMMANDS)
        raise LayerwiseError(f"unknown command {arguments[0]!r}{near}; there are {', '.join(COMMANDS)}")
    result: int = importlib.import_module(COMMANDS[arguments[0]][0]).main(arguments[1:])
    return result


def main() -> None:
    """Entry point of the console script."""
    from layerwise.cli import run_main

    sys.exit(run_main(dispatch))


if __name__ == "__main__":
    main()
