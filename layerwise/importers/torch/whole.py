"""Whole modules: which of a model are parts, called as they are, and the proof that they take each sample by itself.

What a module does of several samples together is found by running it: a batch, and its samples one by one, must give
the same outputs and gradients, for the example and for others made of it, in training and in evaluation.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError, nearest
from layerwise.importers.torch.parts import PLAIN, ModuleInput, WholeModule, copied, held, importing, refused
from layerwise.importers.torch.proof import FEW, ROUNDING, few
from layerwise.importers.torch.read.arguments import Call
from layerwise.importers.torch.read.effects import as_it_was, configured, draws, numbers
from layerwise.importers.torch.trace import Imported
from layerwise.importers.torch.traced_program import TRACING
from layerwise.importers.torch.unfused import distance, fixed_weights
from layerwise.ops.opaque import observed


def parts_of(model: nn.Module, call: Call, samples: int, paths: Sequence[str], why: str) -> dict[str, WholeModule]:
    """The parts of these paths. LayerwiseError for what is no module of the model, or cannot be whole.

    call: the example's, of so many samples.
    """
    modules = dict(model.named_modules())
    for path in paths:
        if not path or path not in modules:
            raise LayerwiseError(
                f"whole= names {path!r}, and the model has no such module{nearest(path, [*filter(None, modules)])}"
            )
    paths = [path for path in dict.fromkeys(paths) if not _within(path, paths)]
    with TRACING, warnings.catch_warnings(), as_it_was(model):
        warnings.simplefilter("ignore")  # what the model says, it says again where it is run
        return {path: _part(model, path, call, samples, why) for path in paths}


def _part(model: nn.Module, path: str, call: Call, samples: int, why: str) -> WholeModule:
    module = model.get_submodule(path)
    _check(model, module, path)
    try:
        stripped = copied(module)  # before it is run: it may keep what it computes of its parameters
    except Exception as error:  # whatever a user's class meets
        raise refused(path, f"it cannot be copied ({type(error).__name__}: {error})") from error
    short, long = (_use(model, module, path, few(call, samples, n)) for n in (FEW, 2 * FEW))
    if short.structure != long.structure or short.returned != long.returned:
        raise refused(path, "what it is called with, or returns, depends on the number of samples")
    arguments = [_along(path, a, b) for a, b in zip(short.arguments, long.arguments, strict=True)]
    results = [_along(path, a, b) for a, b in zip(short.results, long.results, strict=True)]
    made = [x for x in results if isinstance(x, ModuleInput)]
    if not any(isinstance(x, ModuleInput) and x.follows for x in arguments):
        raise refused(path, "it is called with no tensor that has a row a sample")
    if not made or not all(x.follows for x in made) or len({x.dtype for x in made}) > 1:
        raise refused(path, "it must return tensors of one element type, each with a row a sample")
    shapes = tuple(x.shape if isinstance(x, ModuleInput) else x for x in results)
    part = WholeModule(
        path, why, stripped, tuple(arguments), short.structure, shapes, short.returned, made[0].dtype, True
    )  # fmt: skip
    try:
        with torch.enable_grad():
            part.packed(module, _graded(long.tensors), held(module), module.training)
    except Exception:  # if not for having no gradient, `_prove` says why
        part = replace(part, differentiable=False)
    for training in (True, False):
        _prove(part, module, long, training)
    inputs = [x.detach().clone() for x in short.tensors]
    count, names = len(inputs), list(held(module))
    values = [x.detach().clone() for x in held(module).values()]
    work = observed(
        lambda given: part.packed(module, given[:count], dict(zip(names, given[count:], strict=True)), model.training),
        [*inputs, *values],
    )
    module.train(model.training)
    return replace(part, work=work)


def _check(model: nn.Module, module: nn.Module, path: str) -> None:
    """LayerwiseError for a module that no run is needed to refuse."""
    if isinstance(module, torch.jit.ScriptModule):
        raise refused(path, "it is compiled by TorchScript")
    if any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        raise refused(path, "the model is on the meta device, and it has to be run")
    if any(m.training != model.training for m in module.modules()):
        raise refused(path, "some of it is in another mode than the model: call train() or eval() on the whole model")
    own = {id(x): name for name, x in held(module).items()}
    for name, x in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if id(x) in own and not name.startswith(f"{path}."):
            raise refused(path, f"its {own[id(x)]!r} is also the model's {name!r}")


@dataclass(frozen=True)
class _Use:
    """One call of a module."""

    arguments: list[Any]
    structure: pytree.TreeSpec
    results: list[Any]
    returned: pytree.TreeSpec

    @property
    def tensors(self) -> list[Tensor]:
        """That it is called with."""
        return [x for x in self.arguments if isinstance(x, Tensor)]


def _use(model: nn.Module, module: nn.Module, path: str, call: Call) -> _Use:
    """How the model calls the module, which it must do once."""
    uses: list[_Use] = []

    def plain(value: object) -> list[Any]:
        leaves, _ = pytree.tree_flatten(value)
        odd = next((x for x in leaves if not isinstance(x, (Tensor, *PLAIN))), None)
        if odd is not None:
            raise refused(path, f"it is called with, or returns, a {type(odd).__name__}")
        return [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]

    def note(_: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        structures = pytree.tree_flatten((inputs, named))[1], pytree.tree_flatten(output)[1]
        uses.append(_Use(plain((inputs, named)), structures[0], plain(output), structures[1]))

    handle = module.register_forward_hook(note, with_kwargs=True)
    try:
        with torch.no_grad(), configured(model), torch.compiler.set_stance("force_eager"):
            model(*call[0], **call[1])
    except LayerwiseError:
        raise
    except Exception as error:  # the model's own code, which may raise anything
        raise refused(path, f"the model cannot be run here ({type(error).__name__}: {str(error)[:120]})") from error
    finally:
        handle.remove()
    if len(uses) != 1:
        raise refused(path, f"a call of the model calls it {len(uses)} times, not once")
    return uses[0]


def _along(path: str, short: object, long: object) -> object:
    """What a value of a call is, of `FEW` samples and of twice as many."""
    if not isinstance(short, Tensor) or not isinstance(long, Tensor):
        if type(short) is not type(long) or short != long:
            raise refused(path, f"a value that it is called with, or returns, is {short!r} or {long!r} by the batch")
        return short
    if short.shape == long.shape:
        return ModuleInput(tuple(short.shape), short.dtype, follows=False)
    if not short.dim() or (FEW, *long.shape[1:]) != tuple(short.shape) or long.shape[0] != 2 * FEW:
        raise refused(path, "samples are not along dimension 0 of all that it is called with, and returns")
    return ModuleInput(tuple(short.shape[1:]), short.dtype, follows=True)


def _prove(part: WholeModule, module: nn.Module, use: _Use, training: bool) -> None:
    """LayerwiseError where samples are mixed, random numbers drawn, or buffers or attributes changed."""
    follows = [x.follows for x in part.inputs]

    def together(inputs: Sequence[Tensor]) -> Tensor:
        return part.packed(module, inputs, held(module), training)

    def alone(inputs: Sequence[Tensor]) -> Tensor:
        samples = ([x[i : i + 1] if f else x for x, f in zip(inputs, follows, strict=True)] for i in range(2 * FEW))
        return torch.cat([together(each) for each in samples])

    for number, inputs in enumerate(_examples(use.tensors, follows)):
        try:
            with _unchanging(part, module):
                pairs = list(zip(*(_computed(run, module, inputs) for run in (alone, together)), strict=True))
        except LayerwiseError:
            raise
        except Exception as error:  # the module's own code: of other values than the example's it may be right to
            if number == 0:
                raise refused(
                    part.path, f"of one sample it raises {type(error).__name__}: {str(error)[:120]}"
                ) from error
            continue
        largest = max((float(b.nan_to_num(0, 0, 0).abs().max()) for _, b in pairs[1:] if b.numel()), default=0.0)
        # Row by row where each is of a sample: beside a large one, what is wrong with a small one would be nothing.
        along = [True, *(f for f, x in zip(follows, inputs, strict=True) if x.is_floating_point())]
        along += [False] * (len(pairs) - len(along))
        away = [
            distance(*rows, 1e-2 * largest if i else 0.0)
            for i, ((a, b), by_sample) in enumerate(zip(pairs, along, strict=True))
            for rows in (zip(a.split(1), b.split(1), strict=True) if by_sample and a.shape == b.shape else [(a, b)])
        ]
        if not max(away) <= ROUNDING.get(part.dtype, ROUNDING[torch.float32]):
            raise refused(
                part.path,
                "it computes something of several samples together, so that ranks would not give its numbers",
            )


def _examples(tensors: Sequence[Tensor], follows: Sequence[bool]) -> Iterator[list[Tensor]]:
    """The example's inputs, and others: samples of other signs and sizes, so that what compares samples is seen."""
    yield list(tensors)
    for scale in (-1.0, 100.0, 0.0):
        made = []
        for x, along in zip(tensors, follows, strict=True):
            if along and x.is_floating_point():
                x = torch.cat([x[:FEW], x[:FEW].flip(0) * scale])
            elif along and x.dim() > 1:
                x = torch.cat([x[:FEW], x[:FEW].flip(-1)])
            made.append(x)
        yield made


@contextmanager
def _unchanging(part: WholeModule, module: nn.Module) -> Iterator[None]:
    """LayerwiseError where what is done within it draws random numbers, or changes the module."""
    states, counted = _states(), numbers(module)
    buffers = {name: x.detach().clone() for name, x in module.named_buffers()}
    yield
    if _states() != states:
        raise refused(part.path, "it draws random numbers, which would differ from rank to rank")
    moved = next((name for name, x in module.named_buffers() if not torch.equal(x, buffers[name])), None)
    if moved is not None or numbers(module) != counted:
        raise refused(
            part.path, f"it changes {'an attribute' if moved is None else f'its buffer {moved!r}'} in its forward"
        )


def _states() -> tuple[object, ...]:
    """Of all generators of random numbers."""
    devices = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return *draws(), *(x.numpy().tobytes() for x in (torch.random.get_rng_state(), *devices))


def _computed(run: Callable[[Sequence[Tensor]], Tensor], module: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What a function of these tensors makes, its gradients of them and of the module's parameters."""
    inputs = _graded(tensors)
    wanted = [x for x in (*inputs, *module.parameters()) if x.requires_grad]
    with torch.enable_grad():
        made = run(inputs)
        grads: Sequence[Tensor | None] = [None] * len(wanted)
        if made.requires_grad and wanted:
            grads = torch.autograd.grad((made.real * fixed_weights(made[:1])).sum(), wanted, allow_unused=True)
    each = (torch.zeros_like(x) if g is None else g.to_dense() for x, g in zip(wanted, grads, strict=True))
    return [made.detach(), *each]


def _graded(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies whose gradients are wanted where there can be one."""
    return [x.detach().clone().requires_grad_(x.is_floating_point()) for x in tensors]


def import_partly(
    attempt: Callable[[], Imported], model: nn.Module, call: Call, samples: int, parts: Mapping[str, WholeModule]
) -> tuple[Imported, Mapping[str, WholeModule]]:
    """What `attempt` imports, and the parts that it takes: the smallest modules without which it fails.

    parts: those that it has in any case. Raises what is raised without others, where none help.
    """
    first: LayerwiseError | None = None
    imported: tuple[Imported, Mapping[str, WholeModule]] | None = None
    for _ in range(TRIES):
        try:
            with importing(parts):
                made = attempt()
        except LayerwiseError as error:
            first, why, layer = first or error, str(error).partition("; ")[0], _layer(error)
        else:
            if not made.graph.unseen:
                return made, parts
            imported = imported or (made, parts)
            why, layer = f"it {made.graph.unseen[0]}", made.unseen_in
        more = _smallest(model, call, samples, layer, why, parts)
        if not more:
            break
        parts = {path: part for path, part in parts.items() if path not in more and not _within(path, more)} | more
    if imported is not None:
        return imported
    assert first is not None
    raise first


TRIES = 4  # imports


def _layer(error: LayerwiseError) -> str:
    """The layer, or module, that an import failed at."""
    named = re.match("layer '([^']*)'", str(error))
    return str(getattr(error, "layer", named[1] if named else ""))


def _smallest(
    model: nn.Module, call: Call, samples: int, layer: str, why: str, parts: Mapping[str, WholeModule]
) -> dict[str, WholeModule]:
    """The innermost module around a layer that can be whole, and is not yet; none where there is none."""
    steps, modules = layer.partition(":")[0].split("."), dict(model.named_modules())
    for end in range(len(steps), 0, -1):
        path = ".".join(steps[:end])
        if path and path in modules and path not in parts and not _within(path, parts):
            try:
                return parts_of(model, call, samples, [path], why)
            except LayerwiseError:
                continue
    return {}


def _within(path: str, parts: Iterable[str]) -> bool:
    """Whether a module is inside one of these."""
    return any(path.startswith(f"{part}.") for part in parts)
