"""python -m benchmarks.onnx_operators: which of ONNX's operators are imported, and what is said of the others.

Every operator of the newest opset of this onnx, and those that only older ones have, from opset 11 on. Each is tried
with ONNX's own test cases: a case is imported and computes what ONNX says, or it is refused in a sentence.

    python -m benchmarks.onnx_operators --write docs/reference/onnx.md
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx

from layerwise.importers.onnx.constants import FOLDABLE
from layerwise.importers.onnx.control import CONTROL
from layerwise.importers.onnx.file import OLDEST_OPSET
from layerwise.importers.onnx.importer import QUANTISED
from layerwise.importers.onnx.ops.table import TABLE
from tests.importers.onnx.cases import Outcome, outcomes

FROM = 11
ANYWHERE = ("element type", "is no tensor", "is left open", "computes nothing", "is empty", "opset 1 ", ", 0)", "(0, ")
KNOWN_NOW = ("Shape", "Size")  # of a batch that is known
PAGE = """# ONNX operators

Opsets {oldest} to {newest} are read (onnx {version}). Of ONNX's {count} standard operators since opset {start},
{layers} are layers or made of layers; the others are below. They are tried with ONNX's own test cases, {right:,} of
{tried:,} of which are imported, and {wrong} of these compute what ONNX says
(`python -m benchmarks.onnx_operators --write docs/reference/onnx.md`). `layerwise.register_op` teaches an operator that
is missing: [Add an operator](../how-to/add_an_operator.md).

External data is read from the model's own folder. Functions of the file are inlined.

Refused, and not counted here: operators of other domains that are not registered, uint16 to uint64, strings,
sequences and optional values as inputs, open sizes other than the batch, empty tensors, models that compute nothing.

## Layers

{plain}

These are layers but for what the last column says. Cases: imported, of those that ONNX has.

| operator | cases | what is refused |
|---|---:|---|
{rows}
Written out by other operators, as ONNX defines them: {composed}.

## Computed at import

What depends on nothing that is fed or trained is computed once. These are known only so: {folded}.

An If is the branch that constants decide; it is refused where data do.

## Refused by name

Computations with quantised numbers, for inference: {quantised}.

Loops and sequences: {control}.

{refused}.
"""


def main() -> int:
    """Exit code 1 where a case is imported and wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE")
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        found = list(outcomes(Path(folder) / "m.onnx"))
    made = page(operators(), found)
    if asked.write:
        asked.write.write_text(made)
    else:
        print(made)
    wrong = [case.name for case in found if case.wrong]
    print(*(f"{name} is wrong" for name in wrong), sep="\n", file=sys.stderr)
    return int(bool(wrong))


def operators() -> list[str]:
    """The standard ones that some opset from `FROM` on has, training's optimizers and the like left out."""
    every = onnx.defs.get_all_schemas_with_history()
    newest: dict[str, onnx.defs.OpSchema] = {}
    for schema in every:
        if schema.domain == "" and schema.since_version >= newest.get(schema.name, schema).since_version:
            newest[schema.name] = schema
    return sorted(name for name, schema in newest.items() if not schema.deprecated or schema.since_version > FROM)


def page(names: Sequence[str], found: Iterable[Outcome]) -> str:
    """docs/reference/onnx.md."""
    cases: dict[str, list[Outcome]] = defaultdict(list)
    for case in found:
        if len(case.operators) == 1 and not any(words in case.said for words in ANYWHERE):
            cases[case.operators[0]].append(case)
    quantised = [name for name in names if name in QUANTISED or name.startswith("QLinear")]
    control = [name for name in names if name in CONTROL and name != "If"]
    folded = [name for name in names if name not in TABLE and (name in FOLDABLE or name in KNOWN_NOW)]
    others = {*TABLE, *quantised, *control, *folded}
    composed = [name for name in names if name not in others and any(not case.said for case in cases[name])]
    layers = [name for name in names if name in TABLE or name in composed]
    tried = [case for name in layers for case in cases[name]]
    partly = [name for name in layers if any(case.said for case in cases[name])]
    refused = sorted({*names} - {*layers, *quantised, *control, *folded})
    imported = [case for case in tried if not case.said]
    wrong = [case for case in imported if case.wrong]
    return PAGE.format(
        oldest=OLDEST_OPSET,
        newest=onnx.defs.onnx_opset_version(),
        version=onnx.__version__,
        start=FROM,
        count=len(names),
        layers=len(layers),
        right=len(imported),
        wrong=f"all but {len(wrong)}" if wrong else "all",
        composed=", ".join(composed),
        tried=len(tried),
        plain=", ".join(name for name in layers if name not in (*partly, *composed)) + ".",
        rows="".join(_row(name, cases[name]) for name in partly),
        folded=", ".join(folded),
        control=", ".join(control),
        quantised=", ".join(quantised),
        refused=", ".join(refused),
    )


def _row(name: str, cases: Sequence[Outcome]) -> str:
    imported = [case for case in cases if not case.said]
    said = dict.fromkeys(_reason(case.said) for case in cases if case.said)
    return f"| {name} | {len(imported)} of {len(cases)} | {'<br>'.join(said)} |\n"


def _reason(said: str) -> str:
    """The sentence without the layer's name, its sizes and its remedy."""
    said = re.sub(r"^layer '[^']*'( \(\w+\))?: ", "", said)
    said = re.sub(
        r"(, from \(.*?\) to \(.*?\),|, which)? is not supported",
        "",
        re.split(r"; |: (?:build|export|pass|use|replace|write)\b|, but layerwise plans", said)[0],
    )
    said = re.sub(r" by \(.*?\)|the output of layer .*? of shape \(.*?\), |, but layerwise cannot tell .*", "", said)
    return said.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
