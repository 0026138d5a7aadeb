"""The PyTorch importer's table: one row an operator of the training IR of torch.export, without its overload.

The rows themselves are with their families: layers, matrices, element-wise operators, views.
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

# Run as they are: of equal largest elements the gradient goes to one, and what reduces them would share it out.
AS_IT_IS = {"aten::max.dim", "aten::min.dim"}
# Run as they are, too, where a call of them is of a kind that the table does not know.
ELSE_AS_IT_IS = {
    "round", "logit", "special_logit", "einsum", "linalg_vector_norm", "argmax", "index", "gather", "roll", "repeat",
    "index_select", "embedding_bag", "slice_scatter",
}  # fmt: skip

# Of what the importer rewrites: patterns.
OWN: Table = {LOCAL_RESPONSE_NORM: local_response_norm, DROP_PATH: drop_path}

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
