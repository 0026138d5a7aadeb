"""PyTorch -> LayerGraph: a module by torch.export (training IR), an fx graph, an exported program, a .pt2 file."""

from __future__ import annotations

import io
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.export import ExportedProgram
from torch.fx import config as fx_config
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.overrides import TorchFunctionMode

from layerwise.errors import LayerwiseError
from layerwise.graph.layer import LayerGraph
from layerwise.importers.torch.build import Stored, build_graph
from layerwise.importers.torch.on_meta import all_on_meta
from layerwise.importers.torch.patterns import rewrite
from layerwise.importers.torch.program import TRACING, Program, read_program
from layerwise.importers.torch.read.arguments import Arguments
from layerwise.importers.torch.read.configurations import configured
from layerwise.importers.torch.read.structure import OutputStructure, structure_of
from layerwise.importers.torch.read.unseen import TraceWatch

Dims = Sequence[Sequence[str | None]]
Imported = tuple[LayerGraph, Stored, OutputStructure | None, Arguments]


def from_torch(
    model: nn.Module | fx.GraphModule | ExportedProgram | Program,
    example_inputs: Sequence[object] | torch.Tensor | None = None,
    *,
    kwargs: Mapping[str, object] | None = None,
    name: str | None = None,
    dims: Dims | None = None,
) -> LayerGraph:
    """Returns the model's layers at the example's batch, unfused; `LayerGraph.rebatch` changes the batch.

    Nothing is computed but shapes (and small constants), and the model stays as it is. Layers are named by their
    modules: `features.0`, and `layer1.0.add` for an addition in the forward of `layer1.0`. Batch norm and dropout are
    those of training, whatever mode the module is in. Language models of Hugging Face are traced with use_cache=False:
    keys and values for the generation of text are no outputs.

    Sizes that are constants of the network are told from the batch by their value: give an example batch of another
    size than the sequence where a model builds masks or positions from it.

    Args:
        model: A module, an fx graph, an exported program, or `load_pt2(file)`.
        example_inputs: What the model is called with; they may live on the meta device, and so may the model. An
            exported program needs none; an open batch takes the size of these, or of those it was exported with.
        kwargs: What it is called with by name.
        name: The graph's.
        dims: Labels of the dimensions of every tensor input. Default: (n, c, h, w), (n, c, d, h, w), (n); (n, c, l) for
            what goes into a 1-D convolution, pool or batch norm, else (n, s, c); (n, c) for numbers; (n, s),
            (n, h, w), (n, d, h, w) for integers.

    Returns:
        The layers.

    Raises:
        LayerwiseError: The model cannot be traced, or does what no layer stands for.

    Examples:
        >>> graph = from_torch(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.randn(2, 8))
        >>> [layer.kinds for layer in graph.inner]
        ['linear', 'relu']
    """
    return import_torch(model, example_inputs, kwargs=kwargs, name=name, dims=dims)[0]


def import_torch(
    model: nn.Module | fx.GraphModule | ExportedProgram | Program,
    example_inputs: Sequence[object] | torch.Tensor | None = None,
    *,
    kwargs: Mapping[str, object] | None = None,
    name: str | None = None,
    dims: Dims | None = None,
) -> tuple[LayerGraph, Stored]:
    """`from_torch`, and how to read the values of parameters and constants: the model's own tensors, not copies."""
    examples = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs or ())
    title = name or _title(model)
    if isinstance(model, Program):
        try:
            graph, stored = build_graph(rewrite(model), title, dims)
        except LayerwiseError:
            raise
        except Exception as error:  # a file may say anything of its tensors and calls
            said = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            raise LayerwiseError(
                f"model {title!r}: its file is damaged, its calls do not fit together ({said})"
            ) from error
    elif isinstance(model, ExportedProgram):
        graph, stored = build_graph(rewrite(read_program(model, title)), title, dims)
    elif isinstance(model, nn.Module):
        return import_module(model, examples, kwargs=kwargs, name=title, dims=dims)[:2]
    else:
        raise LayerwiseError(
            f"from_torch needs an nn.Module, an fx.GraphModule or an ExportedProgram, not {type(model).__name__}"
        )
    first = next((e for e in examples if isinstance(e, torch.Tensor) and e.dim()), None)
    return (graph if first is None else graph.rebatch(first.shape[0])), stored


TRAINS_OTHERWISE = (
    nn.modules.batchnorm._NormBase,
    nn.modules.dropout._DropoutNd,
    nn.MultiheadAttention,
)  # modules that compute something else in evaluation


def import_module(
    model: nn.Module,
    examples: tuple[object, ...],
    *,
    kwargs: Mapping[str, object] | None = None,
    name: str,
    dims: Dims | None = None,
) -> Imported:
    """`import_torch` of a module, how it returns its outputs (see `structure_of`), and how it was called."""
    if not examples and not kwargs:
        examples = _placeholders(model, name)
    exported, watch = _export(model, examples, dict(kwargs or {}), name)
    graph, stored = build_graph(rewrite(read_program(exported, name)), name, dims)
    unseen = (*watch.found, *watch.changed)
    if watch.changed:  # once, as a flag of the first call? Then the next call changes nothing, and is the same network
        with watch.as_left():
            later, again = _export(model, examples, dict(kwargs or {}), name)
        other, _ = build_graph(rewrite(read_program(later, name)), name, dims)
        unseen = unseen if again.changed or other.digest != graph.digest else tuple(watch.found)
    structure, arguments = (
        structure_of(exported, len(graph.layers[-1].inputs)),
        Arguments.of(model, exported, graph.batch),
    )
    return replace(graph, unseen=unseen), stored, structure, arguments


def _export(
    model: nn.Module, examples: tuple[object, ...], kwargs: dict[str, object], title: str
) -> tuple[ExportedProgram, TraceWatch]:
    """Also what it does not show (see `LayerGraph.unseen`)."""
    for path, module in model.named_modules():
        if module.training != model.training and isinstance(module, TRAINS_OTHERWISE):
            raise LayerwiseError(
                f"layer {path!r} is in {'training' if module.training else 'evaluation'} mode and the model is not: "
                "layerwise has one mode for all; call train() or eval() on the whole model"
            )
        if not model.training and _has_spectral_norm(module):
            raise LayerwiseError(
                f"layer {path!r} has a spectral norm, which moves its vectors in training only: call train() on the "
                "model before it is imported"
            )
        # Traced in evaluation it would look like momentum 0; in training its factor depends on a buffer.
        batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
        if batch_norm and module.momentum is None:
            raise LayerwiseError(
                f"layer {path!r}: batch norm with momentum=None (cumulative averages) is not supported; "
                "give it a momentum, such as 0.1"
            )
    try:
        with (
            TRACING,
            _quiet(),
            TraceWatch().on(model) as watch,
            _synchronised_anywhere(),
            _ranges_as_lists(),
            _cuda_autocast_anywhere(),
            _without_stack_traces(),
            configured(model),
            all_on_meta(model),
        ):
            exported = torch.export.export(model, examples, kwargs, strict=False)
        return exported, watch
    except LayerwiseError:
        raise
    except Exception as error:  # torch.export raises whatever the model's code meets
        raise LayerwiseError(_export_failed(title, error)) from error


def _has_spectral_norm(module: nn.Module) -> bool:
    """Of either of PyTorch's kinds, a parametrization or a hook."""
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, parametrizations._SpectralNorm) or any(isinstance(h, SpectralNorm) for h in hooks)


@contextmanager
def _synchronised_anywhere() -> Iterator[None]:
    """SyncBatchNorm is traced where it would refuse to run: it is a batch norm, of the whole batch as all are here."""
    kind, own = nn.SyncBatchNorm, nn.SyncBatchNorm.forward
    kind.forward = nn.modules.batchnorm._BatchNorm.forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.forward = own  # type: ignore[method-assign]


class _Ranges(TorchFunctionMode):
    """Notes the numbers of `torch.arange(2, 5)`. A patch of it would stay in lists of functions that torch keeps."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.arange and args and not kwargs and all(type(a) is int for a in args):
            made.layerwise_range = list(range(*args))
        return made


@contextmanager
def _ranges_as_lists() -> Iterator[None]:
    """`torch.arange(2, x.dim()).tolist()`, as MONAI's losses have it, is numbers; a trace has none of a tensor."""

    def listed(tolist: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def known_or_listed(tensor: torch.Tensor) -> Any:
            known = getattr(tensor, "layerwise_range", None)
            return tolist(tensor) if known is None else known

        return known_or_listed

    with ExitStack() as stack:
        stack.enter_context(_Ranges())
        for kind in (torch.Tensor, FakeTensor, FunctionalTensor):
            stack.enter_context(mock.patch.object(kind, "tolist", listed(kind.tolist)))
        yield


@contextmanager
def _cuda_autocast_anywhere() -> Iterator[None]:
    """`torch.autocast("cuda")` is traced as it is written where there is no CUDA; it would be traced as turned off."""
    common, cuda = torch.cuda.amp.common, torch.cuda
    missing, supported = common.amp_definitely_not_available, cuda.is_bf16_supported
    if not missing():  # type: ignore[no-untyped-call]
        yield
        return
    common.amp_definitely_not_available, cuda.is_bf16_supported = lambda: False, lambda *_: True
    try:
        yield
    finally:
        common.amp_definitely_not_available, cuda.is_bf16_supported = missing, supported


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's log, warnings and the half-traced graph that it prints: the error that is raised says enough."""
    level, printed = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(printed):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
    sys.stderr.write(printed.getvalue())  # of the model itself, where all went well


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Python's stack at every call of the model takes a third of the time of an export, and nobody reads it here."""
    wanted = getattr(fx_config, "do_not_emit_stack_traces", None)
    if wanted is None:  # an older torch
        yield
        return
    fx_config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        fx_config.do_not_emit_stack_traces = wanted


def _export_failed(title: str, error: Exception) -> str:
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]
    text = f"{type(error).__name__} {error}"
    if "data-dependent" in text or "DataDependent" in text or "control flow" in text:
        said = said.rstrip(".") + _looks_at(error)
        remedy = (
            "the path through the network must not depend on data, and it cannot check values of tensors: write it "
            "with torch.where, or leave it outside"
        )
    else:
        remedy = "check that the model runs on these example inputs, or give its ExportedProgram"
    return f"model {title!r}: torch.export fails with {type(error).__name__}: {said.rstrip('.')}; {remedy}"


def _looks_at(error: BaseException) -> str:
    """Where it failed: the last line that is neither torch's nor ours."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THE_MODEL)]
    if not own or not own[-1].line:
        return ""
    path = Path(own[-1].filename)
    return f" at {path.parent.name}/{path.name}:{own[-1].lineno}, {own[-1].line!r}"


_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


def _placeholders(model: nn.Module, title: str) -> tuple[torch.Tensor, ...]:
    """Example inputs that an fx graph carries itself."""
    examples: list[torch.Tensor] = []
    nodes = model.graph.nodes if isinstance(model, fx.GraphModule) else ()
    for node in nodes:
        if node.op == "placeholder":
            known = node.meta.get("val", node.meta.get("tensor_meta"))
            if known is None or not hasattr(known, "shape"):
                break
            examples.append(torch.empty(tuple(known.shape), dtype=known.dtype, device="meta"))
    else:
        if examples:
            device = next((p.device for p in model.parameters()), torch.device("cpu"))
            return tuple(torch.empty_like(t, device=device) for t in examples)
    raise LayerwiseError(f"model {title!r}: give example inputs, as in from_torch(model, (torch.randn(8, 3, 64, 64),))")


def _title(model: object) -> str:
    if isinstance(model, Program):
        return model.name
    if isinstance(model, ExportedProgram):
        return "model"
    return type(model).__name__
