"""The zoo's table: row by row as they come, and in the form of the page of the docs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from textwrap import shorten

from benchmarks.zoo.trial import Row


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


def tables(rows: Sequence[Row]) -> str:
    """A row a package, and one for each network that is not exact: why."""
    packages: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        packages[row.name.partition("/")[0]].append(row)
    head = "| package | networks | exact | layers | import/export | plan (s) | K | gain |\n|---|" + "---:|" * 7 + "\n"
    compared = {
        "To 1e-6, as they cast a part of themselves to float32": [r for r in rows if r.narrow and not r.widened],
        "With such casts to float64, as these round more": [r for r in rows if r.widened],
        "To 1e-3, as PyTorch has kernels of float32 alone": [r for r in rows if r.single],
        "Beside one rank's layers, as they draw random numbers": [r for r in rows if r.random],
    }
    marked = [f"\n{how}: {', '.join(r.name.partition('/')[2] for r in of)}.\n" for how, of in compared.items() if of]
    return "".join([head, *(_package(package, own) for package, own in packages.items()), *marked, _not_exact(rows)])


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


def _not_exact(rows: Sequence[Row]) -> str:
    """A row for each network that is not exact: what is said of it."""
    found = []
    for row in rows:
        if not row.exact:
            became = "differs" if row.wrong else "not counted" if row.stage in ("build", "export") else "refused"
            found.append(f"| {row.name} | {became} | {_said(row)} |\n")
    return "".join(["\n| not exact | | why |\n|---|---|---|\n", *found]) if found else ""


def _said(row: Row) -> str:
    """Why a network is not exact."""
    texts = [row.said, *row.wrong.values(), *row.refused.values(), row.planned]
    return " ".join(
        f"`{shorten(text, 120, placeholder=' …')}`" for text in dict.fromkeys(t.replace("`", "'") for t in texts if t)
    )
