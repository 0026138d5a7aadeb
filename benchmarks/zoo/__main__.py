"""python -m benchmarks.zoo: published networks, imported, planned for 8 GPUs, and run on 2 ranks against PyTorch.

Each network is tried in a process of its own, under a time limit. `--json FILE` keeps the rows, and goes on where it
was. `make zoo` installs the packages.
"""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.common.command import KEPT, Kept
from benchmarks.zoo.apart import tried
from benchmarks.zoo.compare import TOLERANCES
from benchmarks.zoo.networks import names
from benchmarks.zoo.small import SMALL
from benchmarks.zoo.table import show, summary, tables
from benchmarks.zoo.trial import as_json, row_of


def main() -> int:
    """Prints the table. Exit code 1 where a number is wrong, or (--small) where a network is not exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="such as 'timm/*'")
    parser.add_argument("--list", action="store_true", help="only name the networks")
    parser.add_argument("--small", action="store_true", help="few networks that must be exact, for CI")
    parser.add_argument("--json", type=Path, metavar="FILE", help=KEPT)
    parser.add_argument("--again", choices=("failed", "all"), help="of FILE, what is tried again nevertheless")
    parser.add_argument("--limit-s", type=float, default=300.0, metavar="SECONDS", help="for a network (default 300)")
    parser.add_argument("--jobs", type=int, default=1, help="networks at a time")
    parser.add_argument("--dtype", default="float64", choices=tuple(TOLERANCES))
    parser.add_argument(
        "--untimed", action="store_true", help="no plans for 8 GPUs, no times: whether it is exact only"
    )
    asked = parser.parse_args()
    wanted = [name for name in (SMALL if asked.small else names()) if any(fnmatch(name, glob) for glob in asked.only)]
    if asked.list:
        print("\n".join(wanted))
        return 0
    kept = Kept(asked.json)
    kept.rows = [row for row in kept.rows if not asked.again or (row["exact"] and asked.again == "failed")]
    missing = [name for name in wanted if kept.find(name=name, dtype=asked.dtype) is None]
    for row in tried(missing, asked.limit_s, asked.jobs, asked.dtype, timed=not asked.untimed):
        show(row)
        kept.add(as_json(row))
    rows = [row_of(told) for name in wanted if (told := kept.find(name=name, dtype=asked.dtype))]
    print(summary(rows), tables(rows), sep="\n")
    return int(any(row.wrong or (asked.small and not row.exact) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
