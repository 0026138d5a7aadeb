"""The PyTorch importer's table: a row for each operator of torch.export's training IR, without its overload.

The rows are in their families' files: layers, matrix, pointwise, views, ...
"""

from __future__ import annotations

from layerwise.importers.registry import Build, Table, lookup
from layerwise.importers.torch.ops.index import INDEXING
from layerwise.importers.torch.ops.layers import LAYERS, local_response_norm
from layerwise.importers.torch.ops.matrix import MATRICES, REDUCTIONS
from layerwise.importers.torch.ops.pointwise import ELEMENTWISE, POINTWISE, drop_path
from layerwise.importers.torch.ops.random import RANDOM
from layerwise.importers.torch.ops.recurrent import RECURRENT
from layerwise.importers.torch.ops.views import VIEWS
from layerwise.importers.torch.patterns import DROP_PATH, LOCAL_RESPONSE_NORM

TABLE: Table = {
    **LAYERS, **MATRICES, **POINTWISE, **RANDOM, **RECURRENT, **REDUCTIONS, **VIEWS, **INDEXING
}  # fmt: skip

# Run in PyTorch: among equal maxima one gets the gradient, while a reduction would share it.
AS_IT_IS = {"aten::max.dim", "aten::min.dim"}
# Run in PyTorch too, if a call has a form that the table does not know.
ELSE_AS_IT_IS = {
    "round", "logit", "special_logit", "einsum", "linalg_vector_norm", "argmax", "index", "gather", "roll", "repeat",
    "index_select", "embedding_bag", "slice_scatter",
}  # fmt: skip

# Operators that the importer introduces: see patterns.
OWN: Table = {LOCAL_RESPONSE_NORM: local_response_norm, DROP_PATH: drop_path}

# Operators that cast operands to a common type, or the one asked for, and compute in it.
PROMOTING = ELEMENTWISE | {
    "where", "masked_fill", "lerp", "addcmul", "addcdiv", "cat", "concat", "concatenate", "stack", "sum", "mean",
    "prod", "cumsum", "var", "std", "logsumexp", "linalg_vector_norm", "softmax", "_softmax", "log_softmax",
    "_log_softmax", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "subtract", "multiply", "arctan2", "divide",
    "true_divide", "float_power", "fmax", "fmin", "__and__", "__or__", "__xor__", "clip",
}  # fmt: skip

# Operators that draw random numbers, even from constants only.
DRAWING = frozenset(RANDOM) | {"dropout", "feature_dropout", "native_dropout"}

# Operators whose result has its own shape or its first argument's, and values that no argument decides.
SHAPED_ONLY = frozenset({
    "new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like", "arange",
    "zeros", "ones", "full", "empty", "eye", "linspace", "scalar_tensor", "tril_indices", "triu_indices",
})  # fmt: skip

# Run-time checks, without a result.
CHECKS = ("_assert", "sym_constrain", "_functional_assert", "_print", "_foobar_")


def base_name(target: str) -> str:
    """`add` of `aten::add_.Tensor`."""
    name = target.partition("::")[2].partition(".")[0]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def row(target: str) -> Build | None:
    """The function that builds a call of `target`: a user's own row, else the table's."""
    if (own := lookup(target)) is not None:
        return own
    if target in OWN:
        return OWN[target]
    if target in AS_IT_IS:
        return None
    return TABLE.get(base_name(target)) if target.startswith("aten::") else None
