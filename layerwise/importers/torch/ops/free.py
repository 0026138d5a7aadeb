"""Free dimensions of operators that have no class in layerwise: those that each index passes through independently.

A row gives, for each dimension of each tensor of a call, the output dimension that it corresponds to, or None if the
operator needs all of it. https://pytorch.org/docs/stable/torch.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from layerwise.importers.functions import letters
from layerwise.importers.registry import Call
from layerwise.importers.tensors import named_dims
from layerwise.importers.torch.ops.table import base_name
from layerwise.ops.opaque import Free

Shape = tuple[int, ...]
Row = Callable[[Call, Shape], Free]  # from a call and its output's shape; () if nothing is known


def along(name: str) -> Row:
    """The dimensions that an argument names are not free, the others are: sort, a Fourier transform."""

    def row(call: Call, out: Shape) -> Free:
        worked = named_dims(call, name)
        return tuple(tuple(None if i in worked else i for i in range(len(t.shape))) for t in call.tensors)

    return row


def reduced(name: str) -> Row:
    """Like `along`, but the result lacks the named dimensions, unless the call keeps them."""

    def row(call: Call, out: Shape) -> Free:
        worked, rank = named_dims(call, name), len(call.tensors[0].shape)
        kept = [i for i in range(rank) if i not in worked]
        to = {i: i if call.flag("keepdim") else kept.index(i) for i in kept}
        alike = all(t.shape == call.tensors[0].shape for t in call.tensors)
        return (tuple(to.get(i) for i in range(rank)),) * len(call.tensors) if alike else ()

    return row


def last(worked: int) -> Row:
    """Operators on stacks of matrices or images, in the last dimensions; the others are free."""

    def row(call: Call, out: Shape) -> Free:
        shape = call.tensors[0].shape
        free = len(shape) - worked
        alike = all(len(t.shape) == len(shape) and t.shape[:free] == shape[:free] for t in call.tensors)
        return tuple(tuple(i if i < free else None for i in range(len(t.shape))) for t in call.tensors) if alike else ()

    return row


def first(free: int, rank: int) -> Row:
    """The first dimensions (samples, channels) of tensors of that rank are free; other tensors are tables."""

    def row(call: Call, out: Shape) -> Free:
        if len(call.tensors[0].shape) != rank:
            return ()  # a single sample, without its dimension
        ranks = (len(t.shape) for t in call.tensors)
        return tuple((*range(free), *(None,) * (rank - free)) if r == rank else (None,) * r for r in ranks)

    return row


def elements(call: Call, out: Shape) -> Free:
    """All dimensions are free, numpy's broadcasting included."""
    skip = [len(out) - len(t.shape) for t in call.tensors]
    return tuple(
        tuple(i + k if extent == out[i + k] else None for i, extent in enumerate(t.shape))
        for t, k in zip(call.tensors, skip, strict=True)
    )


def of_first(call: Call, out: Shape) -> Free:
    """All dimensions of the first tensor are free; the other tensors are tables."""
    x, *others = call.tensors
    return (tuple(range(len(x.shape))), *((None,) * len(t.shape) for t in others))


def indices(call: Call, out: Shape) -> Free:
    """einsum: dimensions in the result are free; summed ones and diagonals are not."""
    terms, result = letters(str(call["equation"]), call.tensors)
    whole = {c for term in (*terms, result) for c in term if term.count(c) > 1}
    return tuple(tuple(result.index(c) if c in result and c not in whole else None for c in term) for term in terms)


def sampled(call: Call, out: Shape) -> Free:
    """grid_sample: the output has the grid's size; the grid's last dimension is coordinates."""
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
    """The free dimensions of a call with this output shape; () if none. pointwise: torch marks it element-wise."""
    row = FREE.get(base_name(call.target)) if call.target.startswith("aten::") else None
    if row is None:
        return elements(call, out) if pointwise else ()
    found = row(call, out)
    free = tuple(  # broadcast dimensions are not free
        tuple(
            to if to is not None and to < len(out) and out[to] == extent else None
            for to, extent in zip(line, t.shape, strict=True)
        )
        for line, t in zip(found, call.tensors, strict=bool(found))
    )
    return free if any(to is not None for line in free for to in line) else ()
