"""The oracle against ParaDL's published measurements: `python -m benchmarks.oracle [--calibrate] [--fit]`.

Constants come from calibration records alone (`--calibrate` derives them again); accuracy is of check records, and
`--fit` shows the one constant that is fitted to these, which is off by default.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean

from benchmarks.paradl.facts import Facts, facts_of
from benchmarks.paradl.framework import Framework, framework
from benchmarks.paradl.project import case_of, project
from benchmarks.published.calibrate import calibrate, projected
from benchmarks.published.records import Record, factor, log_errors, order, read_records
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.oracle.phases import Phases
from layerwise.oracle.runs import accuracy
from layerwise.oracle.strategies import HYBRID, Wishes

RECORDS = Path(__file__).parent / "published" / "abci_v100.json"
# What the paper claims (Kahira et al., section 5.2), and what its report's figure 2 gives for three networks.
CLAIMED = {"data": 0.9610, "filter": 0.8556, "channel": 0.7367, "df": 0.9143, "ds": 0.8346}
RECOMPUTED = {"data": 0.798, "filter": 0.528, "channel": 0.451, "df": 0.744, "ds": 0.470}
HEADINGS = (*2 * ("whole", "compute", "commun."), "theirs", "claimed", "recomp.")
RESOLUTION = 0.026  # of two bars, each read to 1.3 %
MANY = 256  # GPUs, from which on hybrids take longer than projected
TRIVIAL = ("data", "df", "ds", "filter", "channel")  # the order that nearly every case has


@lru_cache
def facts(model: str, batch: int, runs: str) -> Facts:
    """A network without fusion, as Chainer runs it, on one V100, with the published time of a sample."""
    single = framework("chainermnx", runs).seconds_per_sample
    return facts_of(load_model(model, batch), load("v100"), seconds_per_sample=single[model])


def phases(record: Record, formulas: str, chainer: Framework | None = None) -> Phases:
    """Of an iteration. chainer: the constants of `chainermnx`, if others than the package's."""
    f = facts(record.model, record.batch // record.groups, record.runs)
    if formulas == "chainermnx":
        return projected(record, f, chainer or framework("chainermnx", record.runs)).phases
    wishes = Wishes(inside=record.inside if record.strategy in HYBRID else None)
    return project(case_of(record.strategy, f, record.devices, record.batch, wishes=wishes)).phases


def forecast(record: Record, formulas: str, chainer: Framework | None = None) -> float:
    """Seconds an iteration."""
    return phases(record, formulas, chainer).total_s


def scores(record: Record, formulas: str) -> tuple[float | None, ...]:
    """Accuracy of the whole time, of compute and of communication; None where that was not measured."""
    found = phases(record, formulas)
    pairs = (
        (found.total_s, record.total_s),
        (found.computation_s, record.compute_s),
        (found.communication_s, record.communication_s),
    )
    return tuple(None if measured is None else accuracy(ours, measured) for ours, measured in pairs)


def mean(values: Iterable[float | None]) -> float | None:
    """None of nothing, and where a value is not known."""
    known = list(values)
    return fmean(v for v in known if v is not None) if known and None not in known else None


def table(records: Sequence[Record]) -> None:
    """Accuracy by strategy: of the whole, of compute, of communication."""
    print(f"{'':16}{'ours':26}published forms")
    print(f"{'strategy':10} {'runs':>4}" + "".join(f"{heading:>9}" for heading in HEADINGS))
    means = []
    for name in (s for s in (*TRIVIAL, "spatial") if any(r.strategy == s for r in records)):
        some = [r for r in records if r.strategy == name]
        forms = [map(mean, zip(*(scores(r, form) for r in some), strict=True)) for form in ("chainermnx", "published")]
        means.append([score for form in forms for score in form])
        theirs = mean(None if r.projected_s is None else accuracy(r.projected_s, r.total_s) for r in some)
        _row(name, len(some), [*means[-1], theirs, CLAIMED.get(name), RECOMPUTED.get(name)])
    _row("mean", len(records), list(map(mean, zip(*means, strict=True))))


def _row(name: str, runs: int, values: Sequence[float | None]) -> None:
    print(f"{name:10} {runs:4}" + "".join(f"{'' if v is None else format(v, '.3f'):>9}" for v in values))


def networks(records: Sequence[Record]) -> None:
    """Data parallelism of each network, by constants that its own runs on several GPUs did not set."""
    given = {runs: framework("chainermnx", runs) for runs in ("bars", "logs")}
    several = [r for r in records if r.strategy == "data" and r.devices > 1]
    for model in dict.fromkeys(r.model for r in several if r.use == "calibration"):
        rest = [r for r in records if r.use == "calibration" and (r.model != model or r.devices == 1)]
        constants = calibrate(rest, facts, given)
        some = [r for r in several if r.model == model]
        left = [accuracy(forecast(r, "chainermnx", given[r.runs].having(constants)), r.total_s) for r in some]
        shown = ", ".join(f"{score:.3f} on {r.devices}" for r, score in zip(some, left, strict=True))
        print(f"data parallelism of {model}, constants without its runs: {fmean(left):.3f} on average ({shown} GPUs)")


def ratios(records: Sequence[Record]) -> None:
    """Ratios between strategies and their order, at equal numbers of devices, by seconds a sample: batches differ."""
    by: dict[tuple[str, int], dict[str, Record]] = {}
    for r in records:
        by.setdefault((r.model, r.devices), {})[r.strategy] = r
    errors: dict[str, list[float]] = {"ours": [], "published forms": []}
    scored: dict[str, list[int]] = {label: [0, 0] for label in (*errors, "trivial rule")}
    for (model, devices), group in by.items():
        measured = {name: r.total_s / r.batch for name, r in group.items()}
        groups = {
            "ours": {name: forecast(r, "chainermnx") / r.batch for name, r in group.items()},
            "published forms": {name: forecast(r, "published") / r.batch for name, r in group.items()},
            "trivial rule": {name: float(TRIVIAL.index(name)) for name in group},
        }
        for label, ranks in groups.items():
            if label in errors:
                errors[label] += log_errors(list(ranks.values()), list(measured.values()))
            right, wrong = order(ranks, measured, RESOLUTION)
            scored[label][0] += len(right)
            scored[label][1] += len(right) + len(wrong)
            for a, b in wrong:
                rates = f"{1 / measured[a]:,.0f}, {1 / measured[b]:,.0f} samples/s"
                print(f"{label}: {model} on {devices}: {a} measured before {b} ({rates})")
    for label, some in errors.items():
        print(f"ratios of strategies, {label}: off by a factor of {factor(some):.3f} ({len(some)} pairs)")
    print("order of pairs: " + ", ".join(f"{label} {a}/{b}" for label, (a, b) in scored.items()))


def layers(record: Record) -> int:
    """With weights, of its network."""
    return len(facts(record.model, record.batch // record.groups, record.runs).weighted())


def excess(records: Sequence[Record]) -> None:
    """What hybrids take beyond the projection on many GPUs, in the bars and in the logs of earlier software."""
    for runs in ("bars", "logs"):
        for name in HYBRID:
            some = [r for r in records if (r.runs, r.strategy) == (runs, name) and r.devices >= MANY]
            some = sorted((r for r in some if r.batch == 16 * r.devices), key=lambda r: r.devices)
            if not some:
                continue
            over = [r.total_s - forecast(r, "chainermnx") for r in some]
            first, last = some[0], some[-1]
            each_s = (over[-1] - over[0]) / (last.devices - first.devices) / layers(last)
            sent = (1 - 1 / last.groups) / (1 - 1 / first.groups) - 1  # a ring of groups
            shown = ", ".join(f"{seconds:+.3f} s on {r.devices}" for r, seconds in zip(some, over, strict=True))
            print(
                f"{last.model} {name}, {runs}: {shown} beyond the projection; {1e6 * each_s:.1f} us a further GPU and "
                f"layer with weights (of {layers(last)}), while a GPU sends {sent:.1%} more bytes of gradients"
            )


def fitted_growth_s(records: Sequence[Record]) -> float:
    """The constant that makes the squares of relative errors of hybrids least, a layer with weights and GPU."""
    rows = [
        (layers(r) * r.devices / r.total_s, 1 - forecast(r, "chainermnx") / r.total_s)
        for r in records
        if r.strategy in HYBRID
    ]
    return sum(x * y for x, y in rows) / sum(x * x for x, _ in rows)


def fit(records: Sequence[Record]) -> None:
    """The growth of hybrids as one constant; what it is worth is how one hybrid's hits the other's runs."""
    plain, all_s = framework("chainermnx", "bars"), fitted_growth_s(records)
    print(f"growth_s fitted to all hybrids: {all_s:.3g} s a layer with weights and GPU")
    for name, other in (HYBRID, HYBRID[::-1]):
        some = [r for r in records if r.strategy == name]
        for label, each_s in (
            ("no growth", 0.0),
            (f"fitted to {other}", fitted_growth_s([r for r in records if r.strategy == other])),
            ("fitted to both", all_s),
        ):
            grown = replace(plain, growth_s=each_s)
            mean_accuracy = fmean(accuracy(forecast(r, "chainermnx", grown), r.total_s) for r in some)
            print(f"  {name}, {label} ({1e6 * each_s:.1f} us): {mean_accuracy:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibrate", action="store_true", help="print the constants that calibration records give")
    parser.add_argument("--fit", action="store_true", help="fit the growth of hybrids to the check records")
    args = parser.parse_args()
    records = read_records(RECORDS)
    if args.calibrate:
        given = {runs: framework("chainermnx", runs) for runs in ("bars", "logs")}
        constants = calibrate([r for r in records if r.use == "calibration"], facts, given)
        print(json.dumps(constants))
        return
    check = [r for r in records if r.use == "check"]
    if args.fit:
        fit([r for r in check if r.runs == "bars"])
        return
    for runs, title in (("bars", "bars (no I/O)"), ("logs", "run logs (with data loading)")):
        print(f"\n{title}, all of ResNet-50: accuracy 1 - |projected - measured| / measured")
        table([r for r in check if r.runs == runs])
    print()
    networks(records)
    print()
    ratios([r for r in check if r.runs == "bars"])
    print()
    excess(check)


if __name__ == "__main__":
    main()
