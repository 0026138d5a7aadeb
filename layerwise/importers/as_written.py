"""AsWritten: a model that cannot be taken apart into layers, as a network of one layer that is the model itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.layer import LayerGraph
from layerwise.importers.load import Network
from layerwise.importers.torch.batches import repeated
from layerwise.importers.torch.read.arguments import Arguments, Call, Leaf, signature_of
from layerwise.importers.torch.read.effects import as_it_was
from layerwise.ops.opaque import AsWritten
from layerwise.tensor import TensorSpec

LAYER = "as_written"  # the one layer's name


def as_written(module: nn.Module, call: Call, batch: int, why: LayerwiseError) -> Network:
    """The module as one layer, at `batch` samples. call: what it is called with here, in evaluation.

    why: what keeps it from being split. It is raised where the module cannot be run, either.
    """
    held: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    keys: dict[str, str] = {}
    for key, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            keys[key] = names.setdefault(id(tensor), key)
            held.setdefault(keys[key], tensor)
    if any(tensor.is_meta for tensor in (*held.values(), *module.buffers())):
        raise LayerwiseError(f"{why}. As it is on the meta device it cannot be run as it is written: build it for real")
    examples = [x for x in pytree.tree_leaves(call) if isinstance(x, Tensor)]
    samples = next(x.shape[0] for x in examples if x.dim())
    try:
        with as_it_was(module):
            module.eval()
            by_row = _returns_rows(module, call, samples)
    except Exception as error:  # the model's own code, which may raise anything
        raise why from error
    held = {name: tensor for name, tensor in held.items() if 0 not in tensor.shape}
    floating = (t.dtype for t in (*held.values(), *examples) if t.is_floating_point())
    dtype = str(next(floating, torch.float32)).removeprefix("torch.")
    builder = GraphBuilder(type(module).__name__)
    inputs: list[str] = []

    def leaf(x: object) -> Leaf:
        if not isinstance(x, Tensor):
            return Leaf(None, x)
        inputs.append(builder.input(f"input {len(inputs)}", _spec(x, samples)))
        return Leaf(inputs[-1], (tuple(x.shape), x.dtype))

    arguments = Arguments(signature_of(module), pytree.tree_map(leaf, call), samples)
    op = AsWritten(tuple((tuple(t.shape), isinstance(t, nn.Parameter)) for t in held.values()), dtype, by_row)
    builder.add(LAYER, op, inputs, tuple(held))
    frozen = {name for name, t in held.items() if isinstance(t, nn.Parameter) and not t.requires_grad}
    graph: LayerGraph = builder.finish([LAYER]).freeze(frozen)
    stored = {name: (lambda t=t: t.detach()) for name, t in held.items()}
    built = {name: t.detach() for name, t in held.items()}
    return Network(graph.rebatch(batch), stored, keys, arguments=arguments, built=built, module=module)


def _returns_rows(module: nn.Module, call: Call, samples: int) -> bool:
    """True if all that it returns has a row a sample, at two batches. Raises what the model raises."""
    positional, named = call
    first = _rows(module(*positional, **named))
    try:
        positional, named = repeated(call, samples, 2)
        second = _rows(module(*positional, **named))
    except Exception:  # it takes no other batch
        return False
    return bool(first) and set(first) == {samples} and set(second) == {2 * samples}


def _rows(outputs: object) -> list[int]:
    return [x.shape[0] if x.dim() else 0 for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]


def _spec(x: Tensor, samples: int) -> TensorSpec:
    labels = ("n",) if x.dim() and x.shape[0] == samples else (None,) * min(1, x.dim())
    return TensorSpec(tuple(x.shape), (*labels, *(None,) * (x.dim() - 1)), str(x.dtype).removeprefix("torch."))
