"""AsWritten: a model that cannot be taken apart into layers, as a network of one layer that is the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError
from layerwise.graph.builder import GraphBuilder
from layerwise.importers.load import Network, network_with
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
    tensors = _tensors(module, why)
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
    op = AsWritten(_shapes(tensors), _dtype(*tensors.values(), *examples), by_row)
    return _network(module, op, inputs, arguments, tensors, batch)


def as_written_unbatched(
    module: nn.Module, call: Call, batch: int, counted: Literal["items", "ranks"], why: LayerwiseError
) -> Network:
    """The module as one layer, where no dimension of a tensor is the samples: its one input is their numbers.

    LayerwiseError where the module cannot be called so, in the mode that it has.
    """
    tensors = _tensors(module, why)
    try:
        with as_it_was(module), torch.no_grad():
            module(*call[0], **call[1])
    except Exception as error:  # the model's own code, which may raise anything
        raise LayerwiseError(
            f"{why}; but called with example_inputs as they are the model raises {type(error).__name__}: {error}; give "
            "what one rank calls it with"
        ) from error
    dtype = _dtype(*tensors.values())
    arguments = Arguments(signature_of(module), pytree.tree_map(lambda _: Leaf(None, None), call), batch)
    op = AsWritten(_shapes(tensors), dtype, counted=counted)
    return _network(module, op, {"samples": TensorSpec((batch,), ("n",), dtype)}, arguments, tensors, batch)


def _tensors(module: nn.Module, why: LayerwiseError) -> dict[str, Tensor]:
    """The tensors of the module's state dict, each once, by the first of its names."""
    state = {key: x for key, x in module.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    if any(tensor.is_meta for tensor in (*state.values(), *module.buffers())):
        raise LayerwiseError(f"{why}. As it is on the meta device it cannot be run as it is written: build it for real")
    names = {id(tensor): key for key, tensor in reversed(state.items())}
    return {key: x for key, x in state.items() if names[id(x)] == key and 0 not in x.shape}


def _shapes(tensors: Mapping[str, Tensor]) -> tuple[tuple[tuple[int, ...], bool], ...]:
    return tuple((tuple(t.shape), isinstance(t, nn.Parameter)) for t in tensors.values())


def _dtype(*tensors: Tensor) -> str:
    floating = (t.dtype for t in tensors if t.is_floating_point())
    return str(next(floating, torch.float32)).removeprefix("torch.")


def _network(
    module: nn.Module,
    op: AsWritten,
    inputs: Mapping[str, TensorSpec],
    arguments: Arguments,
    tensors: Mapping[str, Tensor],
    batch: int,
) -> Network:
    """The network of one layer, of these inputs."""
    builder = GraphBuilder(type(module).__name__)
    builder.add(LAYER, op, [builder.input(name, spec) for name, spec in inputs.items()], tuple(tensors))
    state = {key: x for key, x in module.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    made = network_with(builder.finish([LAYER]), {}, tensors, state, batch)
    built = {name: t.detach() for name, t in tensors.items()}
    return replace(made, arguments=arguments, built=built, module=module)


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
