"""The zoo's table: for a terminal, and as the page of the docs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from textwrap import shorten

from benchmarks.zoo.trial import Row

HEAD = """# The zoo: published networks at the first try

`make zoo` installs the packages beside the environment and runs `python -m benchmarks.zoo`; `--list` names the
networks, `--small` is a step of CI. Each network is built at reduced size with random weights, imported, planned for 8
GPUs (profile h100, 8 samples a GPU), and trained for one step on two ranks under five plans: samples, channels, space
or sequence split, the plan of a slow cluster, random configurations. It is evaluated on the same samples, on one sample
a rank, and with weights that are zeroed and loaded again.

*Exact*: in float64 the loss, outputs, gradients, buffers and parameters are within 1e-9 of plain PyTorch on one
device, and the bytes sent are the bytes predicted. Dropout is off.

"""

OTHERS = """
## In other element types

The largest relative difference from plain PyTorch in the same type under the five plans: up to 1e-3 is right in
float32, up to 0.1 in bfloat16.

"""

NOTES = "## Notes\n"  # what follows in the page is written by hand, and kept


def show(row: Row) -> None:
    """One line, as soon as it is known."""
    worst = max(row.differences.values(), default=0.0)
    verdict = "exact" if row.exact else "WRONG" if row.wrong else "not exported" if row.stage == "export" else "refused"
    times = (
        f"export {row.export_s:5.1f} s, import {row.import_s:5.1f} s, plan {row.plan_s:5.1f} s, {row.seconds:5.0f} s"
    )
    print(f"{row.name:40} {verdict:12} {worst:8.1e}  {times}", flush=True)
    for text in (*row.wrong.items(), *row.refused.items()):
        print(f"    {text[0]}: {text[1][:400]}", flush=True)
    for text in (row.said, row.planned):
        if text:
            print(f"    {row.stage}: {text[:400]}", flush=True)


def summary(rows: Sequence[Row]) -> str:
    """What all of them come to."""
    counted = [row for row in rows if row.stage not in ("build", "export")]
    exact = [row for row in counted if row.exact]
    wrong = [row for row in counted if row.wrong]
    planned = [row for row in counted if row.plan_s]
    ratios = [row.import_s / row.export_s for row in counted if row.import_s and row.export_s]
    lines = [
        f"{len(rows)} networks, {len(counted)} of which torch.export exports: {len(exact)} are exact under all plans "
        f"({len(exact) / max(len(counted), 1):.0%}), {len(wrong)} differ, {len(counted) - len(exact) - len(wrong)} are "
        "refused.",
        f"Planning at 8 GPUs: {len(planned)} networks, {sum(row.proven for row in planned)} proven, "
        f"{max((row.plan_s for row in planned), default=0):.1f} s at most.",
    ]
    if ratios:
        lines.append(f"Import over export: {median(ratios):.1f} in the median, {max(ratios):.1f} at most.")
    return "\n".join(lines)


def page(rows: Sequence[Row], others: Sequence[Row] = (), before: str = "") -> str:
    """docs/benchmarks/zoo.md: a row a package. others: of other types; before: the page, whose notes stay."""
    packages: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        packages[row.name.partition("/")[0]].append(row)
    notes = before.partition(NOTES)[2]
    return "".join(
        [
            HEAD,
            summary(rows).replace("\n", "\n\n"),
            "\n\n| package | networks | exact | layers | import/export | plan (s) | K | gain |\n|---|"
            + "---:|" * 7
            + "\n",
            *(_package(package, own) for package, own in packages.items()),
            "\nLayers, K (the final graph of the search) and seconds are the largest. Import/export (CPU time)\n"
            "and gain (predicted, over data parallelism) are the median, and the largest.\n",
            _marked(
                "To 1e-6, as they cast a part of themselves to float32",
                [row for row in rows if row.narrow and not row.widened],
            ),
            _marked("With such casts to float64, as these round more", [row for row in rows if row.widened]),
            _marked("To 1e-3, as PyTorch has kernels of float32 alone", [row for row in rows if row.single]),
            _marked("Beside one rank's layers, as they draw random numbers", [row for row in rows if row.random]),
            _not_exact(rows),
            _by_type(others),
            f"\n{NOTES}{notes}" if notes else "",
        ]
    )


def _package(package: str, rows: Sequence[Row]) -> str:
    ratios = [row.import_s / row.export_s for row in rows if row.import_s and row.export_s]
    planned = [row for row in rows if row.plan_s]
    cells = [str(len(rows)), str(sum(row.exact for row in rows)), str(max(row.layers for row in rows) or "")]
    cells.append(f"{median(ratios):.1f}, {max(ratios):.1f}" if ratios else "")
    if planned:
        gains = [row.gain for row in planned]
        cells += [f"{max(row.plan_s for row in planned):.1f}", str(max(row.final_nodes for row in planned))]
        cells.append(f"{median(gains):.2f}, {max(gains):.2f}")
    else:
        cells += ["", "", ""]
    return f"| {package} | {' | '.join(cells)} |\n"


def _marked(how: str, rows: Sequence[Row]) -> str:
    """A line with the networks that are compared in another way."""
    return f"\n{how}: {', '.join(row.name.partition('/')[2] for row in rows)}.\n" if rows else ""


def _not_exact(rows: Sequence[Row]) -> str:
    """A row for each network that is not exact: what is said of it."""
    found = []
    for row in rows:
        if not row.exact:
            became = "differs" if row.wrong else "not counted" if row.stage in ("build", "export") else "refused"
            found.append(f"| {row.name} | {became} | {_said(row)} |\n")
    return "".join(["\n| not exact | | why |\n|---|---|---|\n", *found]) if found else ""


def _by_type(rows: Sequence[Row]) -> str:
    """The largest difference in other element types, and what is more than is right."""
    parts = []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        own = [row for row in rows if row.dtype == dtype]
        exact = [max(row.differences.values()) for row in own if row.exact]
        most = f", {max(exact):.0e} at most" if exact else ""
        said = "".join(f"; not {row.name}: {_said(row)}" for row in own if not row.exact)
        parts.append(f"- **{dtype}**: {len(exact)} of {len(own)} networks are right{most}{said}\n")
    return OTHERS + "".join(parts) if parts else ""


def _said(row: Row) -> str:
    """Why a network is not exact."""
    texts = [row.said, *row.wrong.values(), *row.refused.values(), row.planned]
    return " ".join(
        f"`{shorten(text, 120, placeholder=' …')}`" for text in dict.fromkeys(t.replace("`", "'") for t in texts if t)
    )
