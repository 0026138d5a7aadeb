"""Finds operators that PyTorch's own modules decompose, in a TracedProgram."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from layerwise.importers.torch.traced_program import Node, Ref, TracedProgram, behind, maker

LOCAL_RESPONSE_NORM = "layerwise::local_response_norm"
DROP_PATH = "layerwise::drop_path"
BATCH_MEAN = 3  # a reduction of torch.nn.functional.kl_div that aten::kl_div lacks


_BETWEEN = (
    "aten::view", "aten::reshape", "aten::squeeze.dim", "aten::unsqueeze", "aten::pad", "aten::constant_pad_nd"
)  # fmt: skip

Made = dict[str, Node]  # value name -> the node that makes it
Match = tuple[dict[str, object], list[Node]]  # arguments of the replacing call, and the nodes behind it
Drawn = tuple[object, object, list[Node]]  # the input, the probability to keep it, and the drawing nodes


def rewrite(program: TracedProgram) -> TracedProgram:
    """The program with all patterns replaced."""
    return _batch_means(_local_response_norms(_drop_paths(program)))


def _drop_paths(program: TracedProgram) -> TracedProgram:
    """Replaces stochastic depth, which zeroes some samples."""

    def match(node: Node, made: Made) -> Match | None:
        drawn = _floored(node, made) or _tossed(node, made) if node.target == "aten::mul.Tensor" else None
        if drawn is None:
            return None
        x, keep, chain = drawn
        assert isinstance(keep, (int, float))
        return {"input": x, "p": 1 - keep}, chain

    return _replaced(program, DROP_PATH, match)


def _replaced(program: TracedProgram, target: str, match: Callable[[Node, Made], Match | None]) -> TracedProgram:
    """The program with matches replaced by calls of `target`, unless other nodes use the results in between."""
    made, uses = program.makers, Counter(program.used)
    replaced: dict[str, Node] = {}
    gone: set[str] = set()
    for node in program.nodes:
        matched = match(node, made)
        if matched is not None and all(uses[n.name] <= 1 for n in matched[1]):
            replaced[node.name] = replace(node, target=target, arguments=matched[0], overload=None)
            gone |= {n.name for n in matched[1]}
    return replace(program, nodes=tuple(replaced.get(n.name, n) for n in program.nodes if n.name not in gone))


def _floored(node: Node, made: Made) -> Drawn | None:
    """x / keep * floor(keep + rand(n, 1, ...)), as Hugging Face writes it."""
    scaled = maker(node.arguments["self"], made)
    chain = _chain(node.arguments["other"], ("aten::floor", "aten::add.Tensor", "aten::rand"), made)
    if scaled is None or scaled.target != "aten::div.Tensor" or chain is None or not _one_a_sample(chain[-1], node):
        return None
    keep, added = scaled.arguments["other"], chain[1]
    alike = added.arguments["other"] == keep and added.arguments.get("alpha", 1) == 1
    return (scaled.arguments["self"], keep, [scaled, *chain]) if alike else None


def _tossed(node: Node, made: Made) -> Drawn | None:
    """x * (empty(n, 1, ...).bernoulli_(keep) / keep), as torchvision and timm write it."""
    for empty in ("aten::empty.memory_format", "aten::new_empty"):
        targets = ("aten::div.Tensor", "aten::bernoulli.float", empty)
        chain = _chain(node.arguments["other"], targets, made)
        if chain is not None and _one_a_sample(chain[-1], node):
            keep = chain[1].arguments["p"]
            alike = chain[0].arguments["other"] == keep and chain[1].arguments.get("generator") is None
            return (node.arguments["self"], keep, chain) if alike else None
    return None


def _chain(value: object, targets: Sequence[str], made: Made) -> list[Node] | None:
    """The nodes that make a value, last first, each from the next one, in place or not. None if the chain differs."""
    chain: list[Node] = []
    for target in targets:
        below = maker(value, made)
        if below is None or below.target.replace("_.", ".").removesuffix("_") != target:
            return None
        chain.append(below)
        value = below.arguments.get("self")
    return chain


def _one_a_sample(drawn: Node, product: Node) -> bool:
    """True if a draw of shape (n, 1, ...) multiplies n samples."""
    shape = drawn.outputs[0].shape if drawn.outputs[0] else ()
    x = product.outputs[0].shape if product.outputs[0] else ()
    return bool(x) and shape == (x[0], *(1,) * (len(x) - 1))


def _local_response_norms(program: TracedProgram) -> TracedProgram:
    """x / (k + alpha * average_pool(pad(x²)))^beta, as torch.nn.functional.local_response_norm exports."""

    def match(node: Node, made: Made) -> Match | None:
        x = node.arguments.get("self")
        if node.target != "aten::div.Tensor" or not isinstance(x, Ref):
            return None
        chain = list(behind([node.arguments["other"]], made, {x.name}).values())
        one = {n.target: n for n in chain if x not in n.operands}
        squares = [n for n in chain if n.target == "aten::mul.Tensor" and n.operands == (x, x)]
        pool = one.get("aten::avg_pool2d", one.get("aten::avg_pool3d"))
        steps = [one.get(name) for name in ("aten::mul.Tensor", "aten::add.Tensor", "aten::pow.Tensor_Scalar")]
        known = {*_BETWEEN, *(n.target for n in (*steps, pool) if n)}
        if pool is None or None in steps or len(squares) != 1 or not one.keys() <= known:
            return None
        numbers = [[*n.arguments.values()][1] for n in steps if n]
        kernel = pool.arguments["kernel_size"]
        if any(isinstance(number, Ref) for number in numbers) or not isinstance(kernel, tuple):
            return None
        return dict(zip(("alpha", "k", "beta"), numbers, strict=True)) | {"input": x, "size": kernel[0]}, chain

    return _replaced(program, LOCAL_RESPONSE_NORM, match)


def _batch_means(program: TracedProgram) -> TracedProgram:
    """kl_div(reduction="batchmean") exports as a sum divided by the batch size, as a number."""
    values = program.values

    def match(node: Node, made: Made) -> Match | None:
        loss = maker(node.arguments.get("self"), made) if node.target == "aten::div.Tensor" else None
        if loss is None or loss.target != "aten::kl_div" or loss.arguments["reduction"] != 2:
            return None
        prediction = loss.arguments["self"]
        assert isinstance(prediction, Ref)
        if node.arguments["other"] != values[prediction.name].shape[0]:
            return None
        return dict(loss.arguments) | {"reduction": BATCH_MEAN}, [loss]

    return _replaced(program, "aten::kl_div", match)
