"""The oracle against ParaDL's published measurements: `python -m benchmarks.oracle [--each] [--calibrate]`.

Constants come from calibration records alone (`--calibrate` derives them again); accuracy is of check records.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean

from benchmarks.published.calibrate import calibrate, projected
from benchmarks.published.records import Record, factor, log_errors, order, read_records
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.oracle.formulas.facts import Facts, facts_of
from layerwise.oracle.formulas.project import case_of, project
from layerwise.oracle.framework import framework
from layerwise.oracle.runs import accuracy
from layerwise.oracle.strategies import HYBRID, Wishes

RECORDS = Path(__file__).parents[1] / "tests" / "oracle" / "abci_v100.json"
# What the paper claims (Kahira et al., section 5.2), and what its report's figure 2 gives for three networks.
CLAIMED = {"data": 0.9610, "filter": 0.8556, "channel": 0.7367, "df": 0.9143, "ds": 0.8346}
RECOMPUTED = {"data": 0.798, "filter": 0.528, "channel": 0.451, "df": 0.744, "ds": 0.470}
HEADINGS = ("strategy", "runs", "ours", "published forms", "their bars", "claimed", "recomputed")
RESOLUTION = 0.026  # of two bars, each read to 1.3 %
MANY = 256  # GPUs, from which on hybrids take longer than projected
TRIVIAL = ("data", "df", "ds", "filter", "channel")  # the order that nearly every case has


@lru_cache
def facts(model: str, batch: int, runs: str) -> Facts:
    """A network without fusion, as Chainer runs it, on one V100, with the published time of a sample."""
    single = framework("chainermnx", runs).seconds_per_sample
    return facts_of(load_model(model, batch), load("v100"), seconds_per_sample=single[model])


def forecast(record: Record, formulas: str) -> float:
    """Seconds an iteration."""
    f = facts(record.model, record.batch // record.groups, record.runs)
    if formulas == "chainermnx":
        return projected(record, f, framework("chainermnx", record.runs)).phases.total_s
    wishes = Wishes(inside=record.inside if record.strategy in HYBRID else None)
    return project(case_of(record.strategy, f, record.devices, record.batch, wishes=wishes)).phases.total_s


def table(records: Sequence[Record], each: bool) -> None:
    """Accuracy by strategy."""
    names = [s for s in (*TRIVIAL, "spatial") if any(r.strategy == s for r in records)]
    print("{:10} {:>4} {:>7} {:>16} {:>11} {:>8} {:>11}".format(*HEADINGS))
    rows = []
    for name in names:
        some = [r for r in records if r.strategy == name]
        ours = [accuracy(forecast(r, "chainermnx"), r.total_s) for r in some]
        plain = [accuracy(forecast(r, "published"), r.total_s) for r in some]
        theirs = [accuracy(r.projected_s, r.total_s) for r in some if r.projected_s is not None]
        shown = f"{fmean(theirs):11.3f}" if theirs else f"{'':11}"
        rows.append((fmean(ours), fmean(plain)))
        print(
            f"{name:10} {len(some):4} {fmean(ours):7.3f} {fmean(plain):16.3f} {shown} "
            f"{CLAIMED.get(name, float('nan')):8.3f} {RECOMPUTED.get(name, float('nan')):11.3f}"
        )
        if each:
            for r, score in zip(some, ours, strict=True):
                f = facts(r.model, r.batch // r.groups, r.runs)
                phases = projected(r, f, framework("chainermnx", r.runs)).phases
                print(
                    f"  {r.id:44} measured {r.total_s:.4f} ({r.compute_s}, {r.communication_s})"
                    f"  ours {phases.total_s:.4f} ({phases.computation_s:.4f}, {phases.communication_s:.4f})"
                    f"  {score:.3f}"
                )
    print(f"{'mean':10} {len(records):4} {fmean(r[0] for r in rows):7.3f} {fmean(r[1] for r in rows):16.3f}")


def ratios(records: Sequence[Record]) -> None:
    """Ratios between strategies and their order, at equal numbers of devices."""
    by: dict[tuple[str, int], dict[str, Record]] = {}
    for r in records:
        by.setdefault((r.model, r.devices), {})[r.strategy] = r
    errors: dict[str, list[float]] = {"ours": [], "published forms": []}
    scores: dict[str, list[int]] = {label: [0, 0] for label in (*errors, "trivial rule")}
    for (model, devices), group in by.items():
        measured = {name: r.total_s for name, r in group.items()}
        groups = {
            "ours": {name: forecast(r, "chainermnx") for name, r in group.items()},
            "published forms": {name: forecast(r, "published") for name, r in group.items()},
            "trivial rule": {name: float(TRIVIAL.index(name)) for name in group},
        }
        for label, ranks in groups.items():
            if label in errors:
                errors[label] += log_errors(list(ranks.values()), list(measured.values()))
            right, wrong = order(ranks, measured, RESOLUTION)
            scores[label][0] += len(right)
            scores[label][1] += len(right) + len(wrong)
            for a, b in wrong:
                seconds = f"{measured[a]:.3f}, {measured[b]:.3f} s"
                print(f"{label}: {model} on {devices}: {a} measured before {b} ({seconds})")
    for label, some in errors.items():
        print(f"ratios of strategies, {label}: off by a factor of {factor(some):.3f} ({len(some)} pairs)")
    print("order of pairs: " + ", ".join(f"{label} {a}/{b}" for label, (a, b) in scores.items()))


def excess(records: Sequence[Record]) -> None:
    """What hybrids take beyond the projection on many GPUs, in the bars and in the logs of earlier software."""
    for runs in ("bars", "logs"):
        for name in ("df", "ds"):
            some = [r for r in records if (r.runs, r.strategy) == (runs, name) and r.devices >= MANY]
            some = sorted((r for r in some if r.batch == 16 * r.devices), key=lambda r: r.devices)
            if not some:
                continue
            over = [r.total_s - forecast(r, "chainermnx") for r in some]
            first, last = some[0], some[-1]
            layers = len(facts(last.model, last.batch // last.groups, runs).weighted())
            each_s = (over[-1] - over[0]) / (last.devices - first.devices) / layers
            sent = (1 - 1 / last.groups) / (1 - 1 / first.groups) - 1  # a ring of groups
            shown = ", ".join(f"{seconds:+.3f} s on {r.devices}" for r, seconds in zip(some, over, strict=True))
            print(
                f"{last.model} {name}, {runs}: {shown} beyond the projection; {1e6 * each_s:.1f} us a further GPU and "
                f"layer with weights (of {layers}), while a GPU sends {sent:.1%} more bytes of gradients"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", action="store_true", help="every run")
    parser.add_argument("--calibrate", action="store_true", help="print the constants that calibration records give")
    args = parser.parse_args()
    records, _ = read_records(RECORDS)
    if args.calibrate:
        given = {runs: framework("chainermnx", runs) for runs in ("bars", "logs")}
        constants = calibrate([r for r in records if r.use == "calibration"], facts, given)
        print(json.dumps(constants))
        return
    check = [r for r in records if r.use == "check"]
    for runs, title in (("bars", "bars (no I/O)"), ("logs", "run logs (with data loading)")):
        print(f"\n{title}: accuracy 1 - |projected - measured| / measured")
        table([r for r in check if r.runs == runs], args.each)
    print()
    ratios([r for r in check if r.runs == "bars"])
    print()
    excess(check)


if __name__ == "__main__":
    main()
