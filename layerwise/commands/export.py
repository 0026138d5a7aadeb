"""layerwise export CHECKPOINT OUT.safetensors: a checkpoint as the state dict of the original model."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass

from layerwise.cli import Parser, command, run_main
from layerwise.errors import shown
from layerwise.files import check_writable, writing


@dataclass(frozen=True, slots=True)
class Exported:
    """The file that was written, and what is in it."""

    checkpoint: str
    out: str
    tensors: int  # names, each alias counts
    bytes: int  # of the file
    steps: int  # done when it was saved


def parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    p = Parser(
        prog="layerwise export",
        description="""Makes one state dict of a checkpoint, whatever plan and number of ranks wrote
it. It has every parameter and buffer under the original model's names, tied
ones under each of theirs, and no state of the optimizer. One tensor is in
memory at a time; neither GPUs nor other ranks are needed. The checkpoint is
verified first, and OUT appears whole or not at all.""",
        epilog="""example:
  torchrun --nproc-per-node 4 -m layerwise.run plan.json --checkpoint runs/a
  layerwise export runs/a model.safetensors

and then, without layerwise:
  state = safetensors.torch.load_file("model.safetensors")
  model.load_state_dict(state, strict=True)""",
    )
    p.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="folder that --checkpoint named, whose latest step is taken, or that of one step: runs/a/step-00000100",
    )
    p.add_argument("out", metavar="OUT.safetensors", help="file that is written")
    p.add_argument(
        "--json", action="store_true", help="write checkpoint, out, tensors, bytes and steps as JSON, for programs"
    )
    return p


def export(checkpoint: str | os.PathLike[str], out: str | os.PathLike[str]) -> Exported:
    """Writes a checkpoint as the state dict of the original model, in one safetensors file.

    Args:
        checkpoint: A folder that `--checkpoint` named, or that of one step.
        out: The file, which appears whole or not at all.

    Returns:
        What was written.

    Raises:
        LayerwiseError: The checkpoint is missing, damaged or not layerwise's, or `out` cannot be written.
    """
    from torch import Tensor  # here, so that --help is quick

    from layerwise.checkpoint.reader import Reader
    from layerwise.checkpoint.save_and_load import MODEL
    from layerwise.checkpoint.step_folders import find
    from layerwise.tensorfile import write_tensors

    check_writable(out)
    reader = Reader(find(checkpoint))
    reader.verify(reader.files)
    saved_as = {name.removeprefix(MODEL): name for name in reader.tensors if name.startswith(MODEL)}

    def read(name: str) -> Tensor:
        return reader.full(saved_as[name])

    with writing(out) as temporary:
        write_tensors(temporary, {name: reader.tensors[saved].spec for name, saved in saved_as.items()}, read)
        size = temporary.stat().st_size
    return Exported(os.fspath(reader.folder), os.fspath(out), len(saved_as), size, reader.about["steps"])


@command(parser)
def main(args: argparse.Namespace) -> None:
    """Exports a checkpoint, and prints what was written. LayerwiseError: one of the two files will not do."""
    done = export(args.checkpoint, args.out)
    if args.json:
        print(json.dumps(asdict(done)))
    else:
        summary = f"{done.tensors} tensors, {done.bytes / 1e6:,.1f} MB, of step {done.steps} ({done.checkpoint})"
        print(shown(f"{done.out}: {summary}"))


if __name__ == "__main__":
    sys.exit(run_main(main))
