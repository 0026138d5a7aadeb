"""The zoo's table: for a terminal, and as the page of the docs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from benchmarks.zoo.trial import Row

HEAD = """# The zoo: published networks at the first try

`python -m benchmarks.zoo` builds published networks at reduced size (random weights, of blocks that repeat one, few
positions), imports them, plans them for 8
GPUs (built-in profile h100, 8 samples a GPU), and runs one step of each on two ranks under five plans: samples split
(data), channels split (model), space or sequence split (spatial), what the search finds for a slow cluster (searched),
and any configuration of any layer (random). In float64, loss, outputs, gradients, buffers and parameters are compared
with plain PyTorch on one device, and the bytes that were sent with those that were predicted. *Exact* is a relative
difference of at most 1e-9 in all of them; *(float32)* marks networks that take a part of themselves to float32
whatever they are given, and are compared to 1e-6. What is dropped is set to 0. *~* marks networks that draw random
numbers: their plans are compared with one rank's layers. Import is layerwise's time over that of `torch.export.export`
(CPU time); K is the size of the final graph of the search. Where they are missing it was run with `--untimed`.

The packages: `make zoo` installs them beside the environment, without what they need themselves (they name different
versions of timm and of torch), and runs this. Any version of torchvision will do, as its compiled part is not used: the
benchmark defines `torchvision::nms`, which torchvision's Python asks for when it is imported.

"""


OTHERS = """
## In other element types

The largest relative difference from plain PyTorch in the same type, of loss, outputs, gradients, buffers and parameters
under the five plans. In float32 at most 1e-3 is right, in bfloat16 at most 0.1.

"""


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


def page(rows: Sequence[Row], others: Sequence[Row] = ()) -> str:
    """docs/benchmarks/zoo.md. others: of other element types."""
    parts = [HEAD, summary(rows).replace("\n", "\n\n"), "\n"]
    packages: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        packages[row.name.partition("/")[0]].append(row)
    for package, own in packages.items():
        parts.append(f"\n## {package}\n\n")
        parts.append(
            "| network | layers | import | plan (s) | proven | K | gain | data, model, spatial, searched, random |\n"
        )
        parts.append("|---|---:|---:|---:|---|---:|---:|---|\n")
        parts += [_line(row) for row in own]
        said = [(row.name.partition("/")[2], text) for row in own if (text := _said(row))]
        parts += ["\n", *(f"- {name}: {text}\n" for name, text in said)] if said else []
    return "".join(parts) + _by_type(others)


def _by_type(rows: Sequence[Row]) -> str:
    """The largest difference of networks in other element types."""
    types = tuple(dict.fromkeys(row.dtype for row in rows))
    if not types:
        return ""
    found = {(row.name, row.dtype): f"{max(row.differences.values()):.0e}" for row in rows if row.exact}
    parts = [OTHERS, f"| network | {' | '.join(types)} |\n", f"|---|{'---:|' * len(types)}\n"]
    for name in dict.fromkeys(row.name for row in rows):
        tried = {row.dtype for row in rows if row.name == name}
        cells = (found.get((name, dtype), "not so" if dtype in tried else "") for dtype in types)
        parts.append(f"| {name} | {' | '.join(cells)} |\n")
    said = [(row, text) for row in rows if (text := _said(row))]
    return "".join([*parts, *(f"\n- {row.name} in {row.dtype}: {text}" for row, text in said)])


def _line(row: Row) -> str:
    name = row.name.partition("/")[2]
    ratio = f"{row.import_s / row.export_s:.1f}" if row.import_s and row.export_s else ""
    plan = (f"{row.plan_s:.1f}", "yes" if row.proven else "no", str(row.final_nodes), f"{row.gain:.2f}")
    cells = plan if row.plan_s else ("", "", "", "")
    verdict = (
        "exact" + " (float32)" * row.narrow + " ~" * row.random
        if row.exact
        else "not counted"
        if row.stage in ("build", "export")
        else ""
    )
    if not verdict:
        verdict = "differs" if row.wrong else "refused"
    return f"| {name} | {row.layers or ''} | {ratio} | {' | '.join(cells)} | {verdict} |\n"


def _said(row: Row) -> str:
    """Why a network is not exact."""
    texts = [row.said, *row.wrong.values(), *row.refused.values(), row.planned]
    return " ".join(f"`{text}`" for text in dict.fromkeys(t.replace("`", "'") for t in texts if t))
