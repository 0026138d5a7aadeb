"""layerwise compare PREDICTED.json MEASURED.json: where a measured step differs from the predicted one."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, cast

from layerwise.cli import Parser, check_files, command, output_arguments, present, run_main
from layerwise.errors import LayerwiseError
from layerwise.files import read_json, write_text
from layerwise.report.content import Report
from layerwise.search.report.traces import differences, differences_table, read_trace


def parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    p = Parser(
        prog="layerwise compare",
        description="Says where a measured step differs from the predicted one, the spans that differ most first: of "
        "the slowest rank, the median of the steps but the first two.",
    )
    p.add_argument("predicted", metavar="PREDICTED.json", help="written by layerwise search --timeline")
    p.add_argument("measured", metavar="MEASURED.json", help="written by layerwise run --trace")
    p.add_argument("--out", metavar="BOTH.json", help="write both into one trace, which opens in ui.perfetto.dev")
    output_arguments(p)
    return p


@command(parser)
def main(args: argparse.Namespace) -> None:
    """Prints where two traces differ. LayerwiseError: a file is no trace of layerwise."""
    check_files({"--html": args.html, "--out": args.out})
    predicted, measured = read_trace(args.predicted), read_trace(args.measured)
    if (
        args.out is not None
        and Path(args.out).exists()
        and any(Path(args.out).samefile(path) for path in (args.predicted, args.measured))
    ):
        raise LayerwiseError(f"--out {args.out} is one of the two traces: name another file")
    if args.out is not None:
        write_text(args.out, json.dumps({"traceEvents": _together(args.predicted, args.measured)}))
    names = ("category", "name", "predicted_s", "measured_s")
    report = Report(
        args.measured,
        f" beside {args.predicted}",
        [differences_table(predicted, measured)],
        lambda: [dict(zip(names, row, strict=True)) for row in differences(predicted, measured)],
    )
    present(report, args, {"both traces": args.out})


def _together(*paths: str) -> list[dict[str, object]]:
    """The events of all, rank beside rank."""
    files = [cast(dict[str, Any], read_json(path, "trace"))["traceEvents"] for path in paths]
    return [
        one | {"pid": one["pid"] * len(files) + i}
        for i, events in enumerate(files)
        for one in events
        if isinstance(one, dict) and isinstance(one.get("pid"), int)
    ]


if __name__ == "__main__":
    sys.exit(run_main(main))
