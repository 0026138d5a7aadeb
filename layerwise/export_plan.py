"""layerwise export-plan PLAN --as FORM: a plan of linear layers for other programs that split these."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence

from layerwise.cli import MODEL_HELP, Parser, check_files, command, run_main
from layerwise.errors import LayerwiseError
from layerwise.files import write_text
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model, planned_call
from layerwise.ops.nn.linear import Linear
from layerwise.plan import Plan, load_plan

FORMS = ("tp_plan", "parallelize_module", "deepspeed")
MOST = 5  # layers that an error names
# The styles by their names in Transformers' tp_plan, as PyTorch's parallelize_module takes them.
STYLES = {
    "colwise": "ColwiseParallel()",
    "colwise_gather_output": "ColwiseParallel(output_layouts=Replicate())",
    "rowwise": "RowwiseParallel()",
    "rowwise_split_input": "RowwiseParallel(input_layouts=Replicate())",
}
NUMBER = re.compile(r"\.\d+(?=\.|$)")  # of a module in a list: Transformers has one rule for all of them


def parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    p = Parser(
        prog="layerwise export-plan",
        description="Writes which linear layers a plan splits by columns and which by rows, for a program that can "
        "do that. It computes all other layers in full on every device, on the same samples. A plan that splits in "
        "other ways is refused, with the names of the layers.",
    )
    p.add_argument("plan", metavar="PLAN.json", help="written by layerwise search --out")
    p.add_argument(
        "--as",
        dest="form",
        choices=FORMS,
        required=True,
        help="JSON for Transformers' DistributedConfig(tp_plan=...); Python for torch.distributed.tensor.parallel; "
        "JSON of DeepSpeed's tensor_parallel section",
    )
    p.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    p.add_argument("--out", metavar="FILE", help="instead of the terminal")
    return p


def export_plan(plan: Plan, network: LayerGraph, form: str) -> str:
    """Returns the text of a plan for another program.

    Args:
        plan: Of the network, with every linear layer split by columns (c) or rows (k) over all devices, or not at all.
        network: Its graph, as `load_model` returns it.
        form: "tp_plan", "parallelize_module" or "deepspeed".

    Returns:
        JSON, or Python.

    Raises:
        LayerwiseError: Layers that are split in other ways, by name; or nothing is split.
    """
    graph = plan.layers(network)
    plan.check(graph)
    styles = _styles(graph, plan)
    if not styles:
        raise LayerwiseError("the plan splits no linear layer by columns or rows: there is nothing to export")
    if form == "parallelize_module":
        rows = "".join(f"    {json.dumps(path)}: {STYLES[style]},\n" for path, style in styles.items())
        return (
            f"# parallelize_module(model, init_device_mesh(device, ({plan.gpus},)), PLAN)\n"
            "from torch.distributed.tensor import Replicate\n"
            "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel\n\n"
            f"PLAN = {{\n{rows}}}\n"
        )
    if form == "tp_plan":
        return json.dumps(_by_rules(styles, graph), indent=1) + "\n"
    inward = [path for path, style in styles.items() if style not in ("colwise", "rowwise")]
    if inward:
        raise LayerwiseError(
            f"DeepSpeed takes a layer split by columns that one split by rows follows, and {_listed(inward)} not so"
        )
    specs = []
    for style, kind in (("rowwise", "row"), ("colwise", "column")):
        patterns = [f"^{re.escape(path)}\\.weight$" for path in styles if styles[path] == style]
        specs.append({"patterns": patterns, "partition_type": kind})
    section = {"autotp_size": plan.gpus, "partition_config": {"use_default_specs": False, "layer_specs": specs}}
    return json.dumps({"tensor_parallel": section}, indent=1) + "\n"


def _styles(graph: LayerGraph, plan: Plan) -> dict[str, str]:
    """The style of each linear module that is split, by path. LayerwiseError where other splits stand in the way."""
    columns, rows, between, others = dict[str, str](), dict[str, str](), set[str](), list[str]()
    for layer in graph.inner:
        degrees = dict(plan.strategy[layer.name].degrees)
        path = _module(layer)
        if degrees == {"c": plan.gpus} and path:
            columns[layer.name] = path
        elif degrees == {"k": plan.gpus} and path:
            rows[layer.name] = path
        elif degrees == {"c": plan.gpus} and not layer.parameters:
            between.add(layer.name)
        elif set(degrees) - {"n"}:
            others.append(f"{layer.name} {plan.strategy[layer.name]}")
    if others:
        raise LayerwiseError(
            f"only linear layers that are split by columns (c) or rows (k) over all {plan.gpus} devices can be "
            f"exported, and there {'is' if len(others) == 1 else 'are'} {_listed(others)}"
        )
    local = _local(set(columns), set(rows), between, graph)
    made = {path: "colwise" if name in local else "colwise_gather_output" for name, path in columns.items()}
    fed = {name for name in rows if graph[name].inputs[0] in local}
    return made | {path: "rowwise" if name in fed else "rowwise_split_input" for name, path in rows.items()}


def _local(columns: set[str], rows: set[str], between: set[str], graph: LayerGraph) -> set[str]:
    """The layers whose outputs stay split by columns: others of them, or layers split by rows, read them.

    What else such a layer reads is split alike, or has no channels.
    """
    local = columns | between
    while True:
        whole = set[str]()
        for source, to, slot in graph.edges():
            product = slot == 0 and to in columns | rows  # the edge is what a linear layer multiplies
            if to not in (rows if product else local):
                whole.add(source)
            if not product and source not in local and "c" in graph[source].out.dims:
                whole.add(to)
        if not local & whole:
            return local
        local -= whole


def _module(layer: Layer) -> str | None:
    """The path of the nn.Linear that a layer is, with what is fused into it and has no parameters; None: it is none."""
    op, names = layer.main, layer.parameters
    if not isinstance(op, Linear) or op.transposed or layer.tied or len(names) != 1 + op.bias:
        return None
    paths = {name.rpartition(".")[0] for name in names}
    return next(iter(paths)) if len(paths) == 1 and names[0].endswith(".weight") else None


def _by_rules(styles: Mapping[str, str], graph: LayerGraph) -> dict[str, str]:
    """The styles by rules for all modules of a list. LayerwiseError where these differ."""
    rules: dict[str, str] = {}
    for layer in graph.inner:
        if (path := _module(layer)) is not None:
            rule = NUMBER.sub(".*", path)
            if rules.setdefault(rule, styles.get(path, "")) != styles.get(path, ""):
                raise LayerwiseError(f"tp_plan has one rule for all of {rule}, and the plan splits {path} otherwise")
    return {rule: style for rule, style in rules.items() if style}


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more


@command(parser)
def main(args: argparse.Namespace) -> None:
    """Writes a plan for another program. LayerwiseError: it cannot be read, or splits layers in other ways."""
    check_files({"--out": args.out})
    plan = load_plan(args.plan)
    network = load_model(*planned_call(plan.model, args.model, plan.batch, plan.provenance))
    text = export_plan(plan, network, args.form)
    if args.out is None:
        print(text, end="")
    else:
        write_text(args.out, text)


if __name__ == "__main__":
    sys.exit(run_main(main))
