"""Loads a MODEL of a command line: a built-in name, an .onnx file, or `package.module:callable`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING

from layerwise.arguments import Count, checked
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.built_in import SAMPLES, written_graph
from layerwise.importers.named_code import called
from layerwise.importers.with_loss import parted, with_loss
from layerwise.models import find, names

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from layerwise.importers.torch.calls.recipes import Recipe
    from layerwise.importers.torch.read.arguments import Arguments, Call, OutputStructure
    from layerwise.importers.torch.trace import Imported

HELP = (
    f"{', '.join(names())}, mlp:1024x2048x10 (any widths), cosmoflow:256, unet3d:64 (any cube), each with +ce, "
    "+dice or +dice+ce for a loss behind it; a .onnx file; "
    "or package.module:callable that returns a module, or a module and its example inputs"
)
# torch.load and torch.export.load unpickle these, so layerwise does not open a stranger's
PICKLED = (".pt2", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class Network:
    """A network as layers, with its values and how it is called."""

    graph: LayerGraph
    # Functions that read its parameters and constants, by their names in the graph. They return None, or a meta tensor,
    # if the network has no values.
    stored: Mapping[str, Callable[[], object]]
    keys: Mapping[str, str]  # names of its state dict -> names of the tensors in the graph
    structure: OutputStructure | None = None  # how outputs are returned; None: a tuple, or a single one as it is
    arguments: Arguments | None = None  # how the model is called; None: with tensors by position
    built: Mapping[str, Tensor] = field(default_factory=dict)  # tensors by name, of a module that this process built
    module: nn.Module | None = None  # the traced module; None: a file, or layers only
    called: frozenset[str] = frozenset()  # paths of the leaf modules that the trace called
    written: frozenset[str] = frozenset()  # paths of module attributes that the trace set or changed
    itself: bool = False  # whether to run the module itself, as the user asked, not a copy
    unproven: str | None = None  # why its layers were not run beside the module when it was imported
    inputs_without_gradient: str | None = None  # why the gradients of inputs differ from the module's
    shared: tuple[str, ...] = ()  # inputs that all samples share, though as long as the example's batch
    shared_found: bool = False  # whether running the module showed that
    together: bool = False  # whether layers may compute samples together

    def value(self, name: str) -> object:
        """A parameter's, buffer's or constant's value; None if it has none."""
        read = self.stored.get(name)
        return None if read is None else read()

    def constant(self, name: str) -> object:
        """The value of a constant layer, or None; `name:2` is a second use of `name`."""
        return self.value(self._own_name(name))

    def recipe(self, name: str) -> Recipe | None:
        """Returns the recipe that computes boxes of a large constant; None for others."""
        from layerwise.importers.torch.calls.recipes import Recipe

        read = self.stored.get(self._own_name(name))
        return read if isinstance(read, Recipe) else None

    def _own_name(self, name: str) -> str:
        return name if name in self.stored else name.partition(":")[0]


@checked
def load_model(spec: str, batch: Count, input_shape: tuple[int, ...] | None = None) -> LayerGraph:
    """Returns the network that `spec` names, unfused. Weights are not needed and not allocated.

    Args:
        spec: A built-in name, an .onnx file, or "package.module:callable".
        batch: The global batch size.
        input_shape: Shape of one sample, for a callable that returns a module without example inputs.

    Returns:
        Its layers. For a built-in network, whose graph is stored, torch is not imported.

    Raises:
        LayerwiseError: There is no such model, or it cannot be imported.

    Examples:
        >>> load_model("lenet5", 32).batch
        32
    """
    written = written_graph(spec) if input_shape is None and parted(spec)[1] is None else None
    if written is None:
        return load_network(spec, batch, input_shape).graph
    return written.rebatch(batch)


def load_network(
    spec: str, batch: int, input_shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
) -> Network:
    """Returns `load_model`'s network with its values. dtype: what the run computes in; None: the model's own type."""
    if batch < 1:
        raise LayerwiseError(f"the global batch must be at least 1, not {batch}")
    suffix = Path(spec).suffix.lower()
    if names_code(spec):
        network, inputs = called(spec, input_shape)
        with refused():
            own = network_of(network, inputs, batch, spec.partition(":")[2])
            return own if dtype is None else with_constants(own, inputs, {}, dtype)
    if input_shape is not None:
        raise LayerwiseError(f"model {spec!r} has its own input shape: --input-shape is for package.module:callable")
    if suffix == ".onnx":
        from layerwise.importers.onnx.from_onnx import import_onnx

        made = import_onnx(spec, batch)
        keys = {name: name for layer in made.graph.layers for name, _ in layer.own_parameters()}
        return Network(made.graph, {name: value.read for name, value in made.values.items()}, keys)
    if suffix in PICKLED:
        raise LayerwiseError(
            f"model {spec!r} is a file that PyTorch would unpickle, which can run its author's code, so layerwise does "
            "not open it: load it yourself and pass the ExportedProgram or module to layerwise.parallelize, or export "
            "it as .onnx"
        )
    return _built_in(spec, batch)


LoadArguments = tuple[str, int, tuple[int, ...] | None]


def planned_call(named: str, model: str | None, batch: int, facts: Mapping[str, object]) -> LoadArguments:
    """The arguments of `load_model` and `load_network` for a plan's network; `facts` is the plan's provenance.

    named: the plan's MODEL; model: what the user passes for it, if anything. A plan is data and may come from anybody:
    raises LayerwiseError if it names code that the user does not name too.
    """
    if model is None and names_code(named):
        raise LayerwiseError(
            f"the plan is for {named!r}, which is code that a plan may not run: if you trust it, pass --model {named} "
            "(in Python: model=...)"
        )
    return model or named, batch, planned_shape(facts.get("input_shape"))


def planned_shape(input_shape: object) -> tuple[int, ...] | None:
    """A plan's --input-shape."""
    return tuple(input_shape) if isinstance(input_shape, list) else None


def names_code(spec: str) -> bool:
    """True if MODEL is package.module:callable, which is imported and called."""
    module, colon, _ = spec.partition(":")
    a_file = Path(spec).suffix.lower() in (".onnx", *PICKLED)
    return bool(colon) and not a_file and module not in ("mlp", "cosmoflow", "unet3d")


def _built_in(spec: str, batch: int) -> Network:
    own, loss = parted(spec)
    model = find(own)  # first, as a wrong name needs no torch
    import torch

    with torch.device("meta"):
        network = model.build()
    inputs = model.example_inputs(SAMPLES)
    if loss is not None:
        network, target = with_loss(network, inputs, own, loss)
        inputs = (*inputs, target)
    # Exported with few samples: tracing does not depend on the batch, and `rebatch` infers the shapes of any batch.
    return network_of(network, inputs, batch, spec, trusted=True)


IMPORTING = RLock()  # torch.export changes state of the process, which another thread's import must not see


def network_of(
    module: nn.Module,
    examples: Sequence[object],
    batch: int | None,
    name: str,
    kwargs: Mapping[str, object] | None = None,
    *,
    trusted: bool = False,
    shared: Collection[str] | None = None,
    together: bool = False,
    as_called: bool = False,
) -> Network:
    """A module as a Network, at `batch` samples (None: the example's). trusted: it is the same network at any batch.

    examples, kwargs: the inputs by position and by name. shared: names of the inputs that all samples share; None:
    running the module shows which of those as long as the batch are. together: whether its layers may compute samples
    together. as_called: it is called with the example's batch alone.
    """
    import torch

    from layerwise.importers.torch.calls.constants import Missing
    from layerwise.importers.torch.calls.recipes import Recipe

    with IMPORTING:
        imported = traced(module, (tuple(examples), dict(kwargs or {})), name, trusted, shared, together, as_called)
    fed = imported.fed
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    made = network_with(imported.graph, imported.stored, tensors, module.state_dict(keep_vars=True), batch)
    known = {key: read() for key, read in made.stored.items() if not isinstance(read, Missing | Recipe)}
    built = {key: value for key, value in known.items() if isinstance(value, torch.Tensor)}
    stored = dict(made.stored) | {key: (lambda t=t: t) for key, t in built.items()}  # later writes are seen
    return replace(
        made, stored=stored, structure=imported.structure, arguments=imported.arguments, built=built, module=module,
        called=imported.called, written=imported.written, unproven=imported.unproven,
        inputs_without_gradient=imported.inputs_without_gradient, shared=() if fed is None else fed.shared,
        shared_found=fed is not None and fed.found, together=together,
    )  # fmt: skip


def with_constants(
    network: Network, examples: Sequence[object], kwargs: Mapping[str, object], dtype: torch.dtype
) -> Network:
    """Returns a module's network with the constants that its forward pass computes in a wider element type.

    A table that a model computes in its own type, such as the sines of positions, has more digits there. Tensors that
    the module holds are as they are. Raises LayerwiseError if the module has other constants in that type.
    """
    import copy

    import torch
    from torch.utils import _pytree as pytree

    from layerwise.importers.torch.batches import import_once
    from layerwise.importers.torch.calls.recipes import Recipe

    own: torch.dtype = getattr(torch, network.graph.dtype)
    if network.module is None or dtype.itemsize <= own.itemsize:
        return network
    attributes = [x for module in network.module.modules() for x in vars(module).values()]
    held = {x.data_ptr() for x in (*network.module.buffers(), *attributes) if isinstance(x, torch.Tensor)}
    computed: dict[str, torch.Tensor] = {}
    for name in sorted(network.stored.keys() - {*network.keys, *network.keys.values()}):
        read = network.stored[name]
        value = read.box(Box.full((1,) * len(read.shape))) if isinstance(read, Recipe) else read()
        if isinstance(value, torch.Tensor) and value.dtype == own and value.data_ptr() not in held:
            computed[name] = value
    if not computed:
        return network
    run_in = f"run it in {network.graph.dtype}"
    try:
        module = copy.deepcopy(network.module).to(dtype)
    except Exception as error:  # of the user's class
        told = f"{type(error).__name__}: {error}"
        raise LayerwiseError(
            f"the model computes constants, and cannot be copied to compute them in {dtype} ({told}): {run_in}"
        ) from error
    call = pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (tuple(examples), dict(kwargs))
    )
    with IMPORTING:
        wide = import_once(module, call, "", network.shared).stored
    values: dict[str, torch.Tensor] = {}
    large: dict[str, Callable[[], object]] = {}
    for name, value in computed.items():
        if isinstance(recipe := wide.get(name), Recipe) and recipe.shape == getattr(network.stored[name], "shape", ()):
            large[name] = recipe
            continue
        made = wide[name]() if name in wide else None
        if not isinstance(made, torch.Tensor) or made.shape != value.shape:
            raise LayerwiseError(f"the model computes other constants in {dtype} (not {name!r}): {run_in}")
        if not torch.equal(made, value.to(dtype)):
            values[name] = made.clone()
    stored = dict(network.stored) | large | {name: partial(values.__getitem__, name) for name in values}
    return replace(network, stored=stored, built={**network.built, **values})


def network_with(
    graph: LayerGraph,
    stored: Mapping[str, Callable[[], object]],
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    batch: int | None,
) -> Network:
    """An imported graph, at `batch` samples, with the tensors and the state dict of what it was traced from.

    tensors: parameters and buffers under all their names; the graph uses one name for each.
    """
    from torch.nn import Parameter

    known: dict[int, str] = {}
    for key, tensor in tensors.items():
        if key in stored or id(tensor) not in known:
            known[id(tensor)] = key
    keys = {key: known.get(id(tensor), key) for key, tensor in state.items()}
    values = dict(stored) | {key: (lambda t=t: t.detach()) for key, t in state.items() if key not in stored}
    frozen = {known[id(t)] for t in tensors.values() if isinstance(t, Parameter) and not t.requires_grad}
    graph = graph.freeze(frozen | graph.unreached)  # PyTorch gives these no gradient, so an optimizer skips them
    return Network(graph if batch is None else graph.rebatch(batch), values, keys)


def traced(
    module: nn.Module,
    call: Call,
    name: str,
    trusted: bool,
    shared: Collection[str] | None,
    together: bool,
    as_called: bool,
) -> Imported:
    """The layers that the module's code computes; the only values are constants."""
    from layerwise.importers.torch.batches import import_as_called, import_for_batches, import_once

    if as_called:
        return import_as_called(module, call, name)
    if trusted:
        return import_once(module, call, name, shared)
    return import_for_batches(module, call, name, shared, together=together)


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """A context that adds to every LayerwiseError what can run the model instead."""
    try:
        yield
    except LayerwiseError as why:
        raise LayerwiseError(f"{str(why).rstrip('.')}; DistributedDataParallel can run it") from why
