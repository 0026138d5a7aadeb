"""The PyTorch importer's table: one row an operator of the training IR of torch.export, without its overload.

The rows themselves are with their families: layers, matrices, element-wise operators, views. What layerwise has no
class for is run as PyTorch does; `FREE` has, for each tensor of such a call and each of its dimensions, the output's
dimension that it goes along with, or None where the operator reads all of it. https://pytorch.org/docs/stable/torch.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from layerwise.importers.functions import letters
from layerwise.importers.registry import Build, Call, Table, lookup
from layerwise.importers.tensors import wrapped
from layerwise.importers.torch.ops.layers import LAYERS, local_response_norm
from layerwise.importers.torch.ops.matrix import MATRICES, RECURRENT, REDUCTIONS, spectral_norm
from layerwise.importers.torch.ops.pointwise import ELEMENTWISE, POINTWISE, RANDOM, drop_path
from layerwise.importers.torch.ops.views import INDEXING, VIEWS
from layerwise.importers.torch.parts import SPECTRAL_NORM, whole_layer
from layerwise.importers.torch.patterns import DROP_PATH
from layerwise.ops.opaque import Free

TABLE: Table = {
    **LAYERS, **MATRICES, **POINTWISE, **RANDOM, **RECURRENT, **REDUCTIONS, **VIEWS, **INDEXING
}  # fmt: skip

# Run as they are: of equal largest elements the gradient goes to one, and what reduces them would share it out.
AS_IT_IS = {"aten::max.dim", "aten::min.dim"}
# Run as they are, too, where a call of them is of a kind that the table does not know.
ELSE_AS_IT_IS = {
    "round", "logit", "special_logit", "einsum", "linalg_vector_norm", "argmax", "index", "gather", "roll", "repeat",
    "index_select", "embedding_bag", "slice_scatter",
}  # fmt: skip

# What the importer writes into a program (patterns), or lets stand in while that is traced (parts).
OWN: Table = {
    SPECTRAL_NORM: spectral_norm,
    "layerwise::local_response_norm": local_response_norm,
    DROP_PATH: drop_path,
    "layerwise::whole": whole_layer,
}

# What takes rows of the last dimension one by one, and the argument that holds them.
ROWWISE = {"aten::linear": "input", "aten::addmm": "mat1", "aten::mm": "self", "aten::matmul": "self"}

# What takes operands of several element types to a common one, or to the one that is asked for, and computes in that.
PROMOTING = ELEMENTWISE | {
    "where", "masked_fill", "lerp", "addcmul", "addcdiv", "cat", "concat", "concatenate", "stack", "sum", "mean",
    "prod", "cumsum", "var", "std", "logsumexp", "linalg_vector_norm", "softmax", "_softmax", "log_softmax",
    "_log_softmax", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "subtract", "multiply", "arctan2", "divide",
    "true_divide", "float_power", "fmax", "fmin", "__and__", "__or__", "__xor__", "clip",
}  # fmt: skip

# What draws random numbers, also of nothing but constants.
DRAWING = frozenset(RANDOM) | {"dropout", "feature_dropout", "native_dropout"}

# Their result has a shape of its own or of its first argument, and values that no argument decides.
SHAPED_ONLY = frozenset({
    "new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like", "arange",
    "zeros", "ones", "full", "empty", "eye", "linspace", "scalar_tensor", "tril_indices", "triu_indices",
})  # fmt: skip

# What else is worth computing where nothing but constants goes in. A closed list: a .pt2 file names operators, too.
FOLDED = frozenset(TABLE) | SHAPED_ONLY | frozenset({
    "add_", "all", "any", "argsort", "bitwise_left_shift", "bitwise_right_shift", "bucketize", "copy_", "cumprod",
    "cumsum", "diag_embed", "diagonal", "diff", "fill", "fill_", "fill_diagonal_", "flip", "gather", "index_fill",
    "index_put", "isin", "masked_fill_", "meshgrid", "one_hot", "outer", "repeat_interleave", "scatter",
    "searchsorted", "select_scatter", "slice_scatter", "sort", "tril", "triu", "zero", "zero_",
})  # fmt: skip

# Checks at run time, without a result.
CHECKS = ("_assert", "sym_constrain", "_functional_assert", "_print", "_foobar_")


def base_name(target: str) -> str:
    """`add` of `aten::add_.Tensor`."""
    name = target.partition("::")[2].partition(".")[0]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def row(target: str) -> Build | None:
    """How to build a call of `target`: a user's own row, else the table's."""
    if (own := lookup(target)) is not None:
        return own
    if target in OWN:
        return OWN[target]
    if target in AS_IT_IS:
        return None
    return TABLE.get(base_name(target)) if target.startswith("aten::") else None


Shape = tuple[int, ...]
Row = Callable[[Call, Shape], Free]  # of a call, and the shape of its output; () where nothing is known of it


def _worked(call: Call, *names: str) -> set[int]:
    """The dimensions that the arguments of these names tell, all where they tell none."""
    rank = len(call.tensors[0].shape)
    told = next((value for name in names if (value := call.get(name)) is not None), None)
    numbers = told if isinstance(told, tuple) else (told,)
    dims = {wrapped(d, rank) for d in numbers if isinstance(d, int)}
    return dims or set(range(rank))


def along(*names: str) -> Row:
    """The dimensions that an argument names are worked on, the others go along: sort, a Fourier transform."""

    def row(call: Call, out: Shape) -> Free:
        worked = _worked(call, *names)
        return tuple(tuple(None if i in worked else i for i in range(len(t.shape))) for t in call.tensors)

    return row


def reduced(*names: str) -> Row:
    """The row of a reduction: dimensions that are worked on are gone from the result, unless it keeps them."""

    def row(call: Call, out: Shape) -> Free:
        worked, rank = _worked(call, *names), len(call.tensors[0].shape)
        kept = [i for i in range(rank) if i not in worked]
        to = {i: i if call.flag("keepdim") else kept.index(i) for i in kept}
        alike = all(t.shape == call.tensors[0].shape for t in call.tensors)
        return (tuple(to.get(i) for i in range(rank)),) * len(call.tensors) if alike else ()

    return row


def last(worked: int) -> Row:
    """Stacks of what the last dimensions hold: matrices, images."""

    def row(call: Call, out: Shape) -> Free:
        shape = call.tensors[0].shape
        free = len(shape) - worked
        alike = all(len(t.shape) == len(shape) and t.shape[:free] == shape[:free] for t in call.tensors)
        return tuple(tuple(i if i < free else None for i in range(len(t.shape))) for t in call.tensors) if alike else ()

    return row


def first(free: int, rank: int) -> Row:
    """The first dimensions of tensors of that rank go along, samples or samples and channels; others are tables."""

    def row(call: Call, out: Shape) -> Free:
        if len(call.tensors[0].shape) != rank:
            return ()  # a single sample, without its dimension
        ranks = (len(t.shape) for t in call.tensors)
        return tuple((*range(free), *(None,) * (rank - free)) if r == rank else (None,) * r for r in ranks)

    return row


def elements(call: Call, out: Shape) -> Free:
    """Every element by itself, numpy's broadcasting included."""
    skip = [len(out) - len(t.shape) for t in call.tensors]
    return tuple(
        tuple(i + k if extent == out[i + k] else None for i, extent in enumerate(t.shape))
        for t, k in zip(call.tensors, skip, strict=True)
    )


def of_first(call: Call, out: Shape) -> Free:
    """Every element of the first tensor by itself; the others are tables."""
    x, *others = call.tensors
    return (tuple(range(len(x.shape))), *((None,) * len(t.shape) for t in others))


def indices(call: Call, out: Shape) -> Free:
    """einsum: what the result has, too, goes along; what is summed over, and a diagonal, is needed whole."""
    terms, result = letters(str(call["equation"]), call.tensors)
    whole = {c for term in (*terms, result) for c in term if term.count(c) > 1}
    return tuple(tuple(result.index(c) if c in result and c not in whole else None for c in term) for term in terms)


def sampled(call: Call, out: Shape) -> Free:
    """grid_sample: the output is as large as the grid, whose last dimension are coordinates."""
    _, grid = call.tensors
    space = range(2, len(grid.shape))
    return (0, 1, *(None for _ in space)), (0, *space, None)


FFT_LAST = ("fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2", "fft_hfft2", "fft_ihfft2")
FFT_ALL = ("fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn", "fft_hfftn", "fft_ihfftn", "fft_fftshift",
           "fft_ifftshift")  # fmt: skip
FREE: Mapping[str, Row] = (
    dict.fromkeys(
        ("topk", "sort", "argsort", "cumprod", "cummax", "cummin", "logcumsumexp", "fft_fft", "fft_ifft", "fft_rfft",
         "fft_irfft", "fft_hfft", "fft_ihfft", *FFT_LAST, *FFT_ALL),
        along("dim"),
    )
    | {"flip": along("dims"), "unfold": along("dimension"), "slice_scatter": along("dim")}
    | dict.fromkeys(
        ("kthvalue", "median", "nanmedian", "mode", "any", "all", "count_nonzero", "argmax", "argmin", "max", "min",
         "aminmax", "linalg_vector_norm", "norm", "nansum", "nanmean", "std_mean", "var_mean", "logsumexp",
         "cosine_similarity"),
        reduced("dim"),
    )
    | dict.fromkeys(
        ("linalg_inv", "linalg_inv_ex", "inverse", "linalg_det", "det", "slogdet", "linalg_slogdet", "linalg_cholesky",
         "linalg_cholesky_ex", "cholesky", "linalg_qr", "linalg_eigh", "linalg_svd", "matrix_exp", "linalg_matrix_exp",
         "tril", "triu", "linalg_matrix_power", "linalg_pinv", "pinverse", "linalg_solve_triangular", "cdist"),
        last(2),
    )
    | {f"_upsample_{mode}2d_aa": first(2, 4) for mode in ("bilinear", "bicubic", "lanczos")}
    | {f"{name}max_pool{d}d{more}": first(2, d + 2) for d in (1, 2, 3) for name, more in (("", "_with_indices"),
                                                                                        ("adaptive_", ""))}
    | {f"max_unpool{d}d": first(2, d + 2) for d in (2, 3)}
    | {f"grid_sampler{more}": sampled for more in ("", "_2d", "_3d")}
    | {"im2col": first(1, 4), "col2im": first(1, 3), "view_as_complex": last(1), "view_as_real": of_first,
       "stft": first(1, 2), "istft": first(1, 3), "bucketize": of_first, "einsum": indices}
    | dict.fromkeys(
        ("real", "imag", "conj", "_conj", "_conj_physical", "conj_physical", "resolve_conj",
         "resolve_neg", "angle", "complex", "polar"),
        elements,
    )
)  # fmt: skip


def free_dims(call: Call, out: Shape, *, pointwise: bool) -> Free:
    """Returns the free dimensions of a call with an output of that shape; () where none is.

    pointwise: torch says that it works on elements.
    """
    row = FREE.get(base_name(call.target)) if call.target.startswith("aten::") else None
    if row is None:
        return elements(call, out) if pointwise else ()
    found = row(call, out)
    free = tuple(  # extents that differ do not go along
        tuple(
            to if to is not None and to < len(out) and out[to] == extent else None
            for to, extent in zip(line, t.shape, strict=True)
        )
        for line, t in zip(found, call.tensors, strict=bool(found))
    )
    return free if any(to is not None for line in free for to in line) else ()
