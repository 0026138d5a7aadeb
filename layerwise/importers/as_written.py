"""AsWritten: a model that cannot be taken apart into layers, as a network of one layer that is the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

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
    held, keys = _held(module, why)
    examples = [x for x in pytree.tree_leaves(call) if isinstance(x, Tensor)]
    samples = next(x.shape[0] for x in examples if x.dim())
    try:
        with as_it_was(module):
            module.eval()
            by_row = _returns_rows(module, call, samples)
    except Exception as error:  # the model's own code, which may raise anything
        raise why from error
    inputs: dict[str, TensorSpec] = {}

    def leaf(x: object) -> Leaf:
        if not isinstance(x, Tensor):
            return Leaf(None, x)
        name = f"input {len(inputs)}"
        inputs[name] = _spec(x, samples)
        return Leaf(name, (tuple(x.shape), x.dtype))

    arguments = Arguments(signature_of(module), pytree.tree_map(leaf, call), samples)
    op = AsWritten(_shapes(held), _dtype(*held.values(), *examples), by_row)
    return _network(module, op, inputs, arguments, held, keys, batch)


def as_written_unbatched(
    module: nn.Module, call: Call, batch: int, counted: Literal["items", "ranks"], why: LayerwiseError
) -> Network:
    """The module as one layer, where no dimension of a tensor is the samples: its one input is their numbers.

    LayerwiseError where the module cannot be called so, in the mode that it has.
    """
    held, keys = _held(module, why)
    try:
        with as_it_was(module), torch.no_grad():
            module(*call[0], **call[1])
    except Exception as error:  # the model's own code, which may raise anything
        raise LayerwiseError(
            f"{why}; but called with example_inputs as they are the model raises {type(error).__name__}: {error}"
        ) from error
    dtype = _dtype(*held.values())
    arguments = Arguments(signature_of(module), pytree.tree_map(lambda _: Leaf(None, None), call), batch)
    op = AsWritten(_shapes(held), dtype, counted=counted)
    return _network(module, op, {"samples": TensorSpec((batch,), ("n",), dtype)}, arguments, held, keys, batch)


def _held(module: nn.Module, why: LayerwiseError) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The module's tensors by name, each once, and that name by every key of the state dict."""
    held: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    keys: dict[str, str] = {}
    for key, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            keys[key] = names.setdefault(id(tensor), key)
            held.setdefault(keys[key], tensor)
    if any(tensor.is_meta for tensor in (*held.values(), *module.buffers())):
        raise LayerwiseError(f"{why}. As it is on the meta device it cannot be run as it is written: build it for real")
    return {name: tensor for name, tensor in held.items() if 0 not in tensor.shape}, keys


def _shapes(held: Mapping[str, Tensor]) -> tuple[tuple[tuple[int, ...], bool], ...]:
    return tuple((tuple(t.shape), isinstance(t, nn.Parameter)) for t in held.values())


def _dtype(*tensors: Tensor) -> str:
    floating = (t.dtype for t in tensors if t.is_floating_point())
    return str(next(floating, torch.float32)).removeprefix("torch.")


def _network(
    module: nn.Module,
    op: AsWritten,
    inputs: Mapping[str, TensorSpec],
    arguments: Arguments,
    held: Mapping[str, Tensor],
    keys: Mapping[str, str],
    batch: int,
) -> Network:
    """The network of one layer, of these inputs."""
    builder = GraphBuilder(type(module).__name__)
    builder.add(LAYER, op, [builder.input(name, spec) for name, spec in inputs.items()], tuple(held))
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
