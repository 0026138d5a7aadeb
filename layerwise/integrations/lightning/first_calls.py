"""first_calls: what a LightningModule calls its networks with in the first step, found by trying it."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn

from layerwise.errors import LayerwiseError

EXAMPLES = "give LayerwiseStrategy(examples={'net': inputs}), what one rank calls its modules with"
STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
IDLE = ("log", "log_dict", "manual_backward", "clip_gradients", "toggle_optimizer", "untoggle_optimizer")


def first_batch(trainer: Trainer) -> Any:
    """Returns the first batch of the loader that will be used; what the loader draws later is as it was.

    LayerwiseError for a data set that can be read only once.
    """
    fitting = trainer.state.fn == TrainerFn.FITTING
    loop: Any = (
        trainer.fit_loop if fitting else trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
    )
    loader = loop._data_source.dataloader()
    if not isinstance(loader, CombinedLoader):
        loader = CombinedLoader(loader, "max_size_cycle" if fitting else "sequential")
    once = [dl for dl in loader.flattened if iter(getattr(dl, "dataset", ())) is getattr(dl, "dataset", None)]
    if once:
        raise LayerwiseError(f"the data set can be read only once, and its first batch is needed before: {EXAMPLES}")
    holders = [holder for dl in loader.flattened for holder in (dl, getattr(dl, "sampler", None))]
    generators = [g for g in (getattr(holder, "generator", None) for holder in holders) if g is not None]
    states = [g.get_state() for g in generators]
    batch, _, _ = next(iter(loader))
    loader.reset()
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    module: Any = trainer.lightning_module
    batch = module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def first_calls(trainer: Trainer, batch: Any) -> dict[str, Any]:
    """Returns example inputs by the path of each module with parameters that the step calls: outermost ones.

    The step is tried without gradients; lists, metrics, losses and buffers are as they were after it. LayerwiseError
    where that fails.
    """
    module: Any = trainer.lightning_module
    assert trainer.state.fn is not None
    name = STEPS[trainer.state.fn.value]
    calls: dict[str, Any] = {}
    running: list[str] = []

    def before(path: str, of: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if not running and path not in calls:
            calls[path] = _example(of, args, named)
        running.append(path)

    numbers = (0, 0)[: max(0, len(inspect.signature(getattr(module, name)).parameters) - 1)]  # of batch and loader
    attributes = vars(module)
    with torch.no_grad(), warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # the first step of training gives them
        stack.callback(attributes.update, dict(attributes))
        stack.callback(attributes.clear)  # which runs before the line above
        attributes.update(_trial(module))
        for path, part in module.named_modules():
            if path and any(True for _ in part.parameters()):
                hook = part.register_forward_pre_hook(lambda m, a, k, p=path: before(p, m, a, k), with_kwargs=True)
                stack.callback(hook.remove)
                stack.callback(part.register_forward_hook(lambda *_: running.pop() and None, always_call=True).remove)
        for buffer in module.buffers():
            stack.callback(buffer.copy_, buffer.clone())
        try:
            getattr(module, name)(batch, *numbers)
        except LayerwiseError:
            raise
        except Exception as error:  # the user's own code, which may raise anything
            told = (str(error).splitlines() or [type(error).__name__])[0]
            raise LayerwiseError(f"{name} could not be tried before training ({told}): {EXAMPLES}") from error
    return {path: call for path, call in calls.items() if not any(path.startswith(f"{other}.") for other in calls)}


class _TrialOptimizer(LightningOptimizer):  # type: ignore[misc] # where Lightning is not installed, its class is Any
    """An optimizer that changes nothing: its steps call their closures alone."""

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        return None if closure is None else closure()

    def toggle_model(self, sync_grad: bool = True) -> AbstractContextManager[None]:
        return nullcontext()


def _trial(module: Any) -> dict[str, Any]:
    """Attributes of a module that neither logs nor trains, whose lists, metrics and losses are copies.

    Its optimizers and schedulers are made for the trial, where the step asks for them.
    """
    collections = (dict, list, set, deque)
    copies: dict[str, Any] = {k: copy.copy(v) for k, v in vars(module).items() if isinstance(v, collections)}
    for name, child in module._modules.items():
        if child is not None and not any(True for _ in child.parameters()):
            copies["_modules"][name] = copy.deepcopy(child)
    configured = cache(lambda: _init_optimizers_and_lr_schedulers(module))

    def optimizers(use_pl_optimizer: bool = True) -> Any:
        made = [_TrialOptimizer(optimizer) for optimizer in configured()[0]]
        return made[0] if len(made) == 1 else made

    def lr_schedulers() -> Any:
        made = [config.scheduler for config in configured()[1]]
        return made[0] if len(made) == 1 else made or None

    def toggled_optimizer(*_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def idle(*_: Any, **__: Any) -> None: ...

    asked = (optimizers, lr_schedulers, toggled_optimizer)
    return copies | {function.__name__: function for function in asked} | dict.fromkeys(IDLE, idle)


def _example(module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Returns the inputs of this call as `parallelize` takes them."""
    if not named:
        return args
    try:
        return dict(inspect.signature(module.forward).bind(*args, **named).arguments)
    except TypeError:  # which the call itself will raise
        return dict(named)
