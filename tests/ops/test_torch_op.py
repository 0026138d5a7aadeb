"""Operators that PyTorch has and layerwise no class for: what they need, and that their cells make the whole."""

from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.ops.base import space
from layerwise.ops.nn.recurrent import Recurrent, RecurrentInOne, ResetFirst
from layerwise.ops.opaque import ElementType, Slot, TorchOp
from layerwise.tensor import TensorSpec
from tests.ops.harness import Reference, check_needs
from tests.ops.kernels import check_kernel
from tests.ops.test_kept import saved

X = TensorSpec((4, 3, 6), ("n", "s", "c"), "float64")
IMAGE = TensorSpec((4, 2, 6, 6), ("n", "c", "h", "w"), "float64")
GRID = TensorSpec((4, 3, 5, 2), ("n", "h", "w", None), "float64")
ONE = ("self", Slot(0))

OPS: dict[str, tuple[TorchOp, tuple[TensorSpec, ...], Reference]] = {
    "whole": (TorchOp("aten::linalg_pinv.atol_rtol_float", (ONE,)), (X,), torch.linalg.pinv),
    "topk": (TorchOp("aten::topk", (ONE, ("k", 2), ("dim", 2)), 0, (), ((0, 1, None),)), (X,),
             lambda x: x.topk(2, 2)[0]),
    "maximum": (TorchOp("aten::max.dim", (ONE, ("dim", 1)), 0, (), ((0, None, 1),)), (X,), lambda x: x.max(1)[0]),
    "flip": (TorchOp("aten::flip", (ONE, ("dims", (1, 2))), 0, (), ((0, None, None),)), (X,), lambda x: x.flip(1, 2)),
    "unfold": (TorchOp("aten::im2col", (ONE, ("kernel_size", (2, 2)), ("dilation", (1, 1)), ("padding", (0, 0)),
                                        ("stride", (1, 1))), 0, (), ((0, None, None, None),)), (IMAGE,),
               lambda x: torch.nn.functional.unfold(x, 2)),
    "grid": (TorchOp("aten::grid_sampler", (("input", Slot(0)), ("grid", Slot(1)), ("interpolation_mode", 0),
                                            ("padding_mode", 0), ("align_corners", False)), 0, (),
                     ((0, 1, None, None), (0, 2, 3, None))), (IMAGE, GRID),
             lambda x, grid: torch.nn.functional.grid_sample(x, grid, align_corners=False)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_cells_make_the_whole(name: str) -> None:
    """Cut in two wherever it may be; what the first of the cells does not need may be anything."""
    op, specs, reference = OPS[name]
    where = space(op, specs)
    cuts = [min(2, d.max_degree) for d in where.dims]
    check_kernel(op, specs, cuts, reference)
    first = Box((0,) * len(cuts), tuple(-(-d.extent // cut) for d, cut in zip(where.dims, cuts, strict=True)))
    check_needs(op, specs, first, reference, tight=False, poison=0.0 if name == "grid" else torch.nan)


def test_a_whole_operator_is_not_split_but_named() -> None:
    """What comes after it may be split."""
    where = space(TorchOp("aten::linalg_pinv.atol_rtol_float", (ONE,)), (X,))
    assert [d.max_degree for d in where.dims] == [1, 1, 1]
    assert where.out.shape == (4, 6, 3)
    assert where.out.dims == ("n", None, None)


def test_types_of_arguments() -> None:
    op = TorchOp("aten::cumprod", (ONE, ("dim", 1), ("dtype", ElementType("float64"))))
    assert op.output(TensorSpec((2, 3), ("n", "c"))).dtype == "float64"


def test_what_pytorch_does_not_take_is_one_sentence() -> None:
    with pytest.raises(LayerwiseError, match=r"aten::topk fails in PyTorch for shapes \(4, 3, 6\)") as raised:
        TorchOp("aten::topk", (ONE, ("k", 9))).output(X)
    assert "\n" not in str(raised.value)
    with pytest.raises(LayerwiseError, match="not registered"):
        TorchOp("nobody::has", (ONE,)).output(X)


@pytest.mark.parametrize("options", [{}, {"layers": 2, "both": True}], ids=str)
@pytest.mark.parametrize("fn", ["lstm", "gru", "rnn_tanh"])
def test_what_a_recurrent_layer_keeps_is_no_more_than_it_says(fn: str, options: dict[str, int]) -> None:
    for hidden in (8, 32):
        op, x = Recurrent(fn, hidden, **options), TensorSpec((8, 16, 16), ("n", "s", "c"))  # type: ignore[arg-type]
        extents = np.array([[d.extent for d in space(op, (x,)).dims]])
        assert saved(op, (x,))[2] <= float(np.max(op.saved((x,), 0 * extents, extents).extra))


@pytest.mark.parametrize("name", ["topk", "whole", "unfold"])
def test_what_an_operator_keeps_is_seen(name: str) -> None:
    op, specs, _ = OPS[name]
    specs = tuple(replace(spec, dtype="float32") for spec in specs)
    extents = np.array([[d.extent for d in space(op, specs).dims]])
    assert saved(op, specs)[2] == float(np.max(op.saved(specs, 0 * extents, extents).extra))


@pytest.mark.parametrize("options", [{}, {"both": True, "layers": 2}, {"batch_first": False, "bias": False},
                                     {"given": True}, {"result": 1, "both": True}], ids=str)  # fmt: skip
@pytest.mark.parametrize("fn", ["lstm", "gru"])
def test_recurrent(fn: str, options: dict[str, int]) -> None:
    op = Recurrent(fn, 5, **options)  # type: ignore[arg-type]
    x = TensorSpec((4, 3, 6), ("n", "s", "c") if op.batch_first else ("s", "n", "c"))
    depth, n = op.layers * op.directions, 4 if op.batch_first else 3
    state = TensorSpec((depth, n, 5), (None, "n", None))
    specs = (x, *(state,) * (fn == "lstm"), state) if op.given else (x,)
    module = getattr(torch.nn, fn.upper())(
        6, 5, op.layers, batch_first=op.batch_first, bidirectional=op.both, bias=op.bias, dtype=torch.float64
    )

    def reference(x: Tensor, *states: Tensor, **held: Tensor) -> Tensor:
        given = None if not states else states if fn == "lstm" else states[0]
        out, last = torch.func.functional_call(module, held, (x, given))
        return out if not op.result else last[0] if fn == "lstm" else last

    where = space(op, specs)
    assert [d.max_degree for d in where.dims if d.label] == [n]
    assert {p.name: p.shape for p in where.parameters} == {k: p.shape for k, p in module.named_parameters()}
    cuts = [2 if d.label else 1 for d in where.dims]
    check_kernel(op, specs, cuts, reference)


@pytest.mark.parametrize("result", [0, 1])
def test_a_gru_that_resets_first(result: int) -> None:
    """The equations of https://onnx.ai/onnx/operators/onnx__GRU.html, one sample, one step and one direction each."""
    op = ResetFirst("gru", 5, both=True, given=True, result=result)
    specs = (TensorSpec((4, 3, 6), ("n", "s", "c")), TensorSpec((2, 4, 5), (None, "n", None)))

    def reference(x: Tensor, first: Tensor, weight_ih_l0: Tensor, weight_hh_l0: Tensor, bias_l0: Tensor) -> Tensor:
        made = [[[first[d, n]] for n in range(4)] for d in (0, 1)]
        for d, n, t in product((0, 1), range(4), range(3)):
            w, r, b = (held[d].chunk(k) for held, k in ((weight_ih_l0, 3), (weight_hh_l0, 3), (bias_l0, 6)))
            read, h = x[n, t if d == 0 else 2 - t], made[d][n][-1]
            update = torch.sigmoid(w[0] @ read + r[0] @ h + b[3] + b[0])
            reset = torch.sigmoid(w[1] @ read + r[1] @ h + b[4] + b[1])
            new = torch.tanh(w[2] @ read + r[2] @ (reset * h) + b[5] + b[2])
            made[d][n].append((1 - update) * new + update * h)
        if result:
            return torch.stack([torch.stack([steps[-1] for steps in of]) for of in made])
        ways = [torch.stack([torch.stack(steps[1:][:: 1 - 2 * d]) for steps in of]) for d, of in enumerate(made)]
        return torch.cat(ways, 2)

    check_kernel(op, specs, [2 if d.label == "n" else 1 for d in space(op, specs).dims], reference)
    extents = np.array([[d.extent for d in space(op, specs).dims]])
    assert saved(op, specs)[2] <= float(np.max(op.saved(specs, 0 * extents, extents).extra))


@pytest.mark.parametrize("fn", ["lstm", "gru"])
def test_recurrent_as_onnx_has_it(fn: str) -> None:
    """W, R and B of both directions; the same work as with weights apart."""
    op, x = RecurrentInOne(fn, 5, both=True), TensorSpec((4, 3, 6), ("n", "s", "c"))  # type: ignore[arg-type]
    module = getattr(torch.nn, fn.upper())(6, 5, batch_first=True, bidirectional=True, dtype=torch.float64)

    def ordered(t: Tensor) -> Tensor:  # ONNX: input, output, forget, cell; update, reset, hidden
        first, second, *rest = t.chunk(4 if fn == "lstm" else 3)
        return torch.cat([first, *rest, second] if fn == "lstm" else [second, first, *rest])

    def reference(x: Tensor, weight_ih_l0: Tensor, weight_hh_l0: Tensor, bias_l0: Tensor) -> Tensor:
        named = {}
        for i, end in enumerate(("", "_reverse")):
            parts = (weight_ih_l0[i], weight_hh_l0[i], *bias_l0[i].chunk(2))
            for name, part in zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), parts, strict=True):
                named[f"{name}_l0{end}"] = ordered(part)
        made: Tensor = torch.func.functional_call(module, named, (x,))[0]
        return made

    check_kernel(op, (x,), [2, 1, 1], reference)
    wide, spec = (
        replace(op, hidden=64),
        TensorSpec((2, 3, 64), ("n", "s", "c")),
    )  # the ordered copies of weights are most
    extents = np.array([[d.extent for d in space(wide, (spec,)).dims]])
    assert saved(wide, (spec,))[2] <= float(np.max(wide.saved((spec,), 0 * extents, extents).extra))
    apart = Recurrent(fn, 5, both=True)  # type: ignore[arg-type]
    extents = np.array([[4, 3, 10]])
    assert op.flops((x,), extents) == apart.flops((x,), extents)
    assert sum(prod(p.shape) for p in space(op, (x,)).parameters) == sum(
        prod(p.shape) for p in space(apart, (x,)).parameters
    )
