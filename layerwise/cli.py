"""Parts of all command lines: flags, the model and machine they name, and how errors end."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, NoReturn, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from layerwise.config import SearchSpace
from layerwise.cost.compute.roofline import OPTIMIZERS
from layerwise.errors import LayerwiseError, shown
from layerwise.files import check_writable, write_text
from layerwise.machine import DEFAULT, DTYPES, MAX_GPUS, load, names, precision
from layerwise.parser import Parser as Parser
from layerwise.plan import MAX_BATCH
from layerwise.report import as_json, html, markdown, text
from layerwise.report.content import Report
from layerwise.tensor import LABELS

MODEL_HELP = "the plan's model, if it is a package.module:callable; code that only a plan names is never run"
PIPED_WIDTH = 80  # columns of output that goes to a file or a pipe: as many as a page, a terminal or a mail has


def run_main(main: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None) -> int:
    """Runs a command; a LayerwiseError is one line on stderr and exit code 2, Ctrl-C is 130."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # whatever the encoding and the names of layers
    try:
        code = main(argv) or 0
        sys.stdout.flush()
        return code
    except LayerwiseError as error:
        line = f"layerwise: error: {' '.join(str(error).split())}\n"
        sys.stderr.write(line)  # in one piece, for the ranks of a node write to one terminal
        sys.last_value = error  # as after a traceback: what is done at exit tells other ranks of it
        return 2
    except BrokenPipeError:  # `| head`: what is still buffered must not raise once more at exit
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("layerwise: interrupted", file=sys.stderr)
        return 130


def command(
    parser: Callable[[], argparse.ArgumentParser],
) -> Callable[[Callable[[argparse.Namespace], int | None]], Callable[..., int]]:
    """Returns a decorator: what a command does with its flags becomes a function of its command line.

    That takes the words behind the command's name (None: this process's), and returns the exit code.
    """

    def main_of(act: Callable[[argparse.Namespace], int | None]) -> Callable[..., int]:
        @wraps(act)
        def main(argv: Sequence[str] | None = None) -> int:
            return act(parser().parse_args(argv)) or 0

        return main

    return main_of


class _Console(Console):
    """A console that writes only what `shown` lets through: control codes are its own."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(shown(text), **options)  # before widths are measured

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown(segment.text))

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError  # for run_main


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal or $COLUMNS; to a pipe or a file PIPED_WIDTH. Names are never markup."""
    piped = not (sys.stderr if stderr else sys.stdout).isatty() and "COLUMNS" not in os.environ
    width = PIPED_WIDTH if piped else None
    return _Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def output_arguments(group: argparse._ActionsContainer, page: str = "--html") -> None:
    """Adds the flags of how the answer is written: --json, --format, --html. page: what the last one is called."""
    group.add_argument("--json", action="store_true", help="write the whole answer as JSON, for programs")
    group.add_argument(
        "--format",
        choices=["text", "md"],
        default="text",
        help="how the answer is printed; md is Markdown (default: text)",
    )
    group.add_argument(
        page, dest="html", metavar="FILE.html", help="also write the answer as a page that needs no other file"
    )


def present(
    report: Report,
    args: argparse.Namespace,
    written: Mapping[str, str | None] | None = None,
    page: Callable[[], Report] | None = None,
) -> None:
    """Writes the answer as `output_arguments` ask for. written: what has been written to which file, if one was asked
    for. page: what a page says, where that is more than the answer.
    """
    if args.html is not None:
        write_text(args.html, html.page(report if page is None else page()))
    if args.json:
        print(as_json.text(report.values()))
        return
    out = console()
    if args.format == "md":
        print(markdown.text(report))
    else:
        out.print(text.text(report))
    for what, path in {**(written or {}), "page": args.html}.items():
        if path is not None:
            out.print(f"{what} written to {path}", soft_wrap=True)


def check_files(paths: Mapping[str, str | None]) -> None:
    """LayerwiseError where a file cannot be written, or two flags name the same. paths: by flag."""
    seen: dict[str, str] = {}
    for flag, path in paths.items():
        if path is None:
            continue
        if (other := seen.setdefault(os.path.realpath(path), flag)) != flag:
            raise LayerwiseError(f"{other} and {flag} name the same file: give each its own")
        check_writable(path)


def machine_arguments(
    parser: argparse.ArgumentParser, default: str | None = DEFAULT, default_name: str = DEFAULT
) -> None:
    """Adds the device graph: --gpus or --nodes, and `profile_arguments`."""
    group = parser.add_argument_group("machine")
    size = group.add_mutually_exclusive_group()
    help_gpus = "number of devices: at most a node's, or those of full nodes; a6000:1,rtx2080ti:2 are unlike ones, in "
    help_gpus += "the order of ranks"
    size.add_argument("--gpus", type=devices_argument, metavar="N", help=help_gpus)
    size.add_argument("--nodes", type=count, metavar="M", help="number of nodes, instead of --gpus")
    profile_arguments(group, default, default_name)


def profile_arguments(
    group: argparse._ArgumentGroup, default: str | None = DEFAULT, default_name: str = DEFAULT
) -> None:
    """Adds --gpu (or --profile), --gpus-per-node, --link, --intra. default_name: what the help calls the default."""
    group.add_argument(
        "--gpu",
        "--profile",
        dest="profile",
        default=default,
        metavar="NAME",
        help=f"a device that `layerwise machines` lists, a profile ({', '.join(names())}), or a .json file "
        f"(default: {default_name})",
    )
    group.add_argument("--gpus-per-node", type=int, metavar="G", help="devices in a node (default: the profile's)")
    group.add_argument("--link", metavar="200Gb/s", help="bandwidth between nodes; 4x200Gb/s means four ports a node")
    group.add_argument(
        "--intra", metavar="300GB/s", help="bandwidth inside a node, each way: a rate, pcie3, pcie4 or pcie5"
    )


def settle_machine(args: argparse.Namespace) -> None:
    """Puts what --link, --intra and kinds of devices ask for into args.profile, and --nodes into args.gpus."""
    links = {name: value for name in ("intra", "link") if (value := getattr(args, name)) is not None}
    if isinstance(kinds := getattr(args, "gpus", None), str):
        links["kinds"] = kinds.replace(",", "+")
        args.profile = kinds.partition(":")[0].partition("@")[0] if args.profile in (None, DEFAULT) else args.profile
        args.gpus = sum(int(kind.rpartition(":")[2]) for kind in kinds.split(","))
    if links:
        if args.profile is not None and args.profile.endswith(".json"):
            flags = " and ".join(f"--{'gpus' if name == 'kinds' else name}" for name in links)
            its = "devices" if "kinds" in links else "links"
            raise LayerwiseError(f"{flags}: the profile {args.profile} states its own {its}")
        stated = {"node": args.gpus_per_node, **links}
        options = [f"{name}={value}" for name, value in stated.items() if value is not None]
        args.profile = ",".join([args.profile or DEFAULT, *options])
    if "nodes" in args and args.gpus is None:
        if args.nodes is None:
            raise LayerwiseError("the following arguments are required: --gpus (or --nodes)")
        args.gpus = args.nodes * (args.gpus_per_node or load(args.profile or DEFAULT).gpus_per_node)


def devices_argument(text: str) -> int | str:
    """`4`, or `a6000:1,rtx2080ti:2` of devices of several kinds."""
    if re.fullmatch(r"[\w.@-]+:[0-9]{1,6}(,[\w.@-]+:[0-9]{1,6})*", text):
        return text
    return argument(text, int, lambda _: True, "a number of devices such as 4, or kinds such as a6000:1,rtx2080ti:2")


def training_arguments(parser: argparse.ArgumentParser) -> None:
    """The training step: batch, optimizer, element type."""
    group = parser.add_argument_group("training step")
    batch = group.add_mutually_exclusive_group()
    batch.add_argument("--batch", type=int, metavar="B", help="samples per GPU (default: 32)")
    batch.add_argument("--global-batch", type=int, metavar="B", help="samples of a step on all GPUs together")
    group.add_argument(
        "--input-shape",
        type=shape,
        metavar="3x224x224",
        help="shape of one sample, needed if MODEL is a callable that returns a module alone",
    )
    optimizer_argument(group)
    dtype_argument(group)


def optimizer_argument(group: argparse._ArgumentGroup) -> None:
    """Adds --optimizer, of what is planned."""
    group.add_argument(
        "--optimizer",
        choices=list(OPTIMIZERS),
        default="sgd",
        help="optimizer whose state and update are planned (default: sgd)",
    )


def dtype_argument(group: argparse._ArgumentGroup) -> None:
    """--dtype, of what is planned."""
    group.add_argument(
        "--dtype",
        type=precision,
        choices=list(DTYPES),
        default="float32",
        help="type that layers compute in; with bf16 and float16 parameters stay float32 (default: float32)",
    )


def step_arguments(group: argparse._ArgumentGroup, io: str = "as in layerwise search") -> None:
    """Adds the flags of the step that is planned: --input-shape, --optimizer, --dtype, --io (whose help is `io`)."""
    group.add_argument(
        "--input-shape", type=shape, metavar="3x224x224", help="shape of one sample, as in layerwise search"
    )
    optimizer_argument(group)
    dtype_argument(group)
    group.add_argument("--io", choices=["auto", "sample", "free", "boxes"], default="auto", help=io)


def space_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the flags of what may be split: --dims, --degrees."""
    group.add_argument(
        "--dims", metavar="n,c,h,w", help="dimensions that may be split (default: all but k, the reduction)"
    )
    group.add_argument(
        "--degrees",
        choices=["all", "powers-of-two"],
        default="all",
        help="degrees that are tried: all divisors of N, or powers of two",
    )


def search_space(args: argparse.Namespace, *, spread: bool) -> SearchSpace:
    """The space that the flags of `machine_arguments` and `space_arguments` ask for."""
    powers_of_two = args.degrees == "powers-of-two"
    if args.dims is None:
        return SearchSpace(args.gpus, powers_of_two=powers_of_two, spread=spread)
    dims = tuple(d.strip() for d in args.dims.split(",") if d.strip())
    if not dims or set(dims) - {*LABELS, "k"}:
        raise LayerwiseError(f"--dims {args.dims!r}: choose from {','.join(LABELS)} and k, joined by commas")
    return SearchSpace(args.gpus, dims, powers_of_two, spread)


T = TypeVar("T")


def argument(text: str, parse: Callable[[str], T], fits: Callable[[T], bool], what: str) -> T:
    """The value of a flag. argparse's error, which says what it should be, unless it can be parsed and fits."""
    try:
        value: T | None = parse(text)
    except ValueError:
        value = None
    if value is None or not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def shape(text: str) -> tuple[int, ...]:
    """`3x224x224`."""
    what = "sizes joined by x, such as 3x224x224"
    return argument(text, lambda t: tuple(map(int, t.lower().split("x"))), lambda sizes: min(sizes) >= 1, what)


def count(text: str) -> int:
    """A whole number of at least 1."""
    what = "a whole number of at least 1"
    return argument(text, lambda t: int(t) if t.isdecimal() else 0, lambda number: number >= 1, what)


def counts(text: str) -> tuple[int, ...]:
    """`1..8,12` -> (1, 2, 4, 8, 12): each number once, in order. argparse's error for anything else."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        try:
            low, high = int(first), int(last if dots else first)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not numbers of GPUs such as 16, 1,2,4 or 1..1024 (the powers of two)"
            ) from None
        if not 1 <= low <= high <= MAX_GPUS:
            raise argparse.ArgumentTypeError(f"{part!r}: from 1 to {MAX_GPUS:,}, the smaller number first")
        powers = [1 << n for n in range(MAX_GPUS.bit_length()) if low <= 1 << n <= high]
        if dots and not powers:
            raise argparse.ArgumentTypeError(f"{part!r} has no power of two in it; name the numbers: {low},{high}")
        numbers.update(powers if dots else [low])
    return tuple(sorted(numbers))


def positive(text: str) -> float:
    """A finite number above 0: seconds, or GiB."""
    return argument(text, float, lambda number: 0 < number < math.inf, "a number above 0")


def seconds(text: str) -> float:
    """`120s`, `2m`, `90`: seconds, above 0."""
    factor = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    what = "a time such as 120s or 5m"
    return argument(
        text, lambda t: float(t[:-1]) * factor if factor else float(t), lambda value: 0 < value < math.inf, what
    )


def global_batch(batch: int | None, over_all: int | None, gpus: int) -> int:
    """Samples a step."""
    total = over_all if over_all is not None else (32 if batch is None else batch) * gpus
    if total < 1:
        raise LayerwiseError(f"the global batch is {total} samples; give --batch or --global-batch of at least 1")
    if total > MAX_BATCH:
        raise LayerwiseError(f"the global batch is {total} samples; at most {MAX_BATCH:,} can be planned for")
    return total
