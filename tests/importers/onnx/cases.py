"""ONNX's own test cases, one or more of every operator: what layerwise imports of them, and whether it is right."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.onnx.from_onnx import import_onnx
from layerwise.importers.onnx.ops.table import TABLE
from tests.importers.onnx.compute import compute

Array = NDArray[np.generic]

# Cases that say something else than the operator does: inference with a cache, random numbers, no tensor, 0/0; and the
# mean of a loss over the elements that are not ignored (ours is a mean over samples). Classes that there are not are an
# error when they come. No elements, or no tensor, is nothing to plan.
OTHER = ("with_past", "training_dropout", "training_mode", "bf16", "bfloat16", "cast", "l2normalization_axis_0",
         "onehot_out_of_range", "split_to_sequence", "triu_zero", "tril_zero")  # fmt: skip
IGNORED_MEANS = ("nllloss_NCd1d2_no_weight_reduction_mean_ii", "nllloss_NCd1_ii", "sce_mean_no_weight_ii")
# What is not imported of these is asked for by their cases.
MORE_OUTPUTS = ("LayerNormalization", "Dropout", "MaxPool", "BatchNormalization", "Attention")


@dataclass(frozen=True)
class Outcome:
    """Of one case. `said`: why it is not imported; empty where it is. `wrong`: what we have, and what ONNX says."""

    name: str
    operators: tuple[str, ...]
    said: str = ""
    wrong: tuple[tuple[Array, Array], ...] = ()


def outcomes(path: Path) -> Iterator[Outcome]:
    """Of every case. path: of a file that is written again and again.

    As few of its inputs as can be are fed, and the others are stored in the model.
    """
    for i, case in enumerate(_cases()):
        name = case.name.removeprefix("test_")
        if name.endswith("_expanded") and i % 4:  # the same, written out: one in four will do
            continue
        if not case.data_sets or any(word in name for word in OTHER) or name.startswith(IGNORED_MEANS):
            continue
        yield _outcome(name, case, path)


def _outcome(name: str, case: Any, path: Path) -> Outcome:
    operators = tuple(node.op_type for node in case.model.graph.node)
    first = ""
    for keep in (1, 2, 3) if operators[0] in TABLE else (1,):
        fed = _fed(case, keep, path)
        graph, weights, said = attempt(path)
        first = first or said
        if graph is None:
            continue
        wrong = []
        for ours, theirs in zip(compute(graph, fed, weights), case.data_sets[0][1], strict=False):
            if ours.ndim == 1 and theirs.ndim == 0:  # a loss: ours has a number a sample
                ours = np.asarray(ours.sum() if "sum" in name else ours.mean())
            if not np.allclose(ours.astype(np.float64), theirs.astype(np.float64), 2e-3, 1e-3, equal_nan=True):
                wrong.append((ours, theirs))
        return Outcome(name, operators, "", tuple(wrong))
    return Outcome(name, operators, first)


def attempt(path: Path) -> tuple[LayerGraph | None, Mapping[str, Array], str]:
    """The graph and its values; or why there is none."""
    try:
        made = import_onnx(path)
        return made.graph, {name: value.read() for name, value in made.values.items()}, ""
    except LayerwiseError as error:
        return None, {}, str(error)


def _cases() -> list[Any]:
    """Without their source, and with pools by arrays: onnx computes these element by element, for most of a minute."""
    from onnx.backend.test.case.node import collect_testcases

    with (
        warnings.catch_warnings(),
        mock.patch("onnx.reference.ops.op_pool_common.pool", _pool),
        mock.patch("inspect.getsource", return_value="@staticmethod\ndef export() -> None:\n"),
    ):
        warnings.simplefilter("ignore")
        return list(collect_testcases(None))


def _pool(
    padded: Array,
    x_shape: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int] | None,
    out_shape: Sequence[int],
    pooling_type: str,
    pads_required: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    count_include_pad: int = 0,
    p: int = 1,
) -> Array:
    """As onnx.reference.ops.op_pool_common.pool: what a window has beyond the padding, or is NaN, does not count."""
    rank = len(kernel)
    steps, spread = strides or (1,) * rank, dilations or (1,) * rank
    values = np.asarray(padded, np.float64)
    for i in range(rank):
        reach, room = (kernel[i] - 1) * spread[i] + 1, _both(pads_required, i, rank)
        count = int((x_shape[i + 2] + room - reach) / steps[i] + 1)
        at = steps[i] * np.arange(count)[:, None] + spread[i] * np.arange(kernel[i])
        inside = (at < x_shape[i + 2] + _both(pads, i, rank)) & (at < padded.shape[i + 2])
        taken = np.take(values, np.where(inside, at, 0), axis=i + 2)
        mask = inside.reshape(*(1,) * (i + 2), *at.shape, *(1,) * (taken.ndim - i - 4))
        values = np.moveaxis(np.where(mask, taken, np.nan), i + 3, -1)
    dims = tuple(range(-rank, 0))
    if pooling_type == "LPPOOL":
        made = np.nansum(np.abs(values) ** p, dims) ** (1 / p)
    else:
        made = (np.nanmean if pooling_type == "AVG" else np.nanmax)(values, dims)
    out = np.zeros((*x_shape[:2], *out_shape))
    out[tuple(map(slice, made.shape))] = made
    return out.astype(padded.dtype)


def _both(pads: Sequence[int] | None, i: int, rank: int) -> int:
    return 0 if pads is None else pads[i] + pads[rank + i]


def _fed(case: Any, keep: int, path: Path) -> list[Array]:
    """Writes the case's model with all inputs but the first `keep` stored in it."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    values = case.data_sets[0][0]
    inputs = list(model.graph.input)
    for given, value in list(zip(inputs, values, strict=False))[keep:]:
        if isinstance(value, (np.ndarray, np.generic)):
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), given.name))
    del model.graph.input[:]
    model.graph.input.extend(inputs[:keep])
    if model.graph.node[0].op_type in MORE_OUTPUTS:
        del model.graph.output[1:]
    onnx.save(model, path)
    return list(values[:keep])
