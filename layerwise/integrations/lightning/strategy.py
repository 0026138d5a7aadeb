"""LayerwiseStrategy: Lightning's trainer over networks that layerwise splits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Unpack

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from layerwise.api.arguments import DEFAULT
from layerwise.api.parallelize import Keywords, parallelize
from layerwise.errors import LayerwiseError
from layerwise.integrations.lightning.first_calls import EXAMPLES, first_batch, first_calls
from layerwise.integrations.optimizer_state import full_state, load_full_state, parallel_modules
from layerwise.run.local_tensor import is_dtensor
from layerwise.run.parallel import ParallelModule, of

CONTRADICTS = {"inference", "device_mesh", "autocast"}  # of parallelize: what Lightning says, or has no way to
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
STEPS = "layerwise_steps"  # in a checkpoint, of each module: its random numbers follow from them


class LayerwiseStrategy(DDPStrategy):  # type: ignore[misc] # where Lightning is not installed, its class is Any
    """Lightning's strategy "layerwise": the networks that a step calls are split, layer by layer.

        import layerwise.integrations.lightning
        trainer = Trainer(strategy="layerwise", devices=8)     # was: strategy="ddp"

    Losses and weights are those of one device on all ranks' samples. Modules that the first batch's step calls are made
    parallel, each with a plan of its own; parameters outside of them are averaged over the ranks, as with DDP.

    Args:
        examples: Of each module to be split, by path, what one rank calls it with. None: the first batch tells.
        process_group_backend: As torch.distributed calls it.
        timeout: Of Lightning's own collectives.
        keywords: Those of `layerwise.parallelize`.
    """

    model: Any
    lightning_module: Any
    precision_plugin: Any

    def __init__(
        self,
        examples: Mapping[str, Any] | None = None,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        **keywords: Unpack[Keywords],
    ) -> None:
        odd = sorted(CONTRADICTS & set(keywords)) + ["io"] * (keywords.get("options", DEFAULT).io is not None)
        if odd:
            raise LayerwiseError(f"LayerwiseStrategy takes no {odd[0]}=: Lightning's Trainer says how it trains")
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._examples, self._keywords = examples, keywords
        self._synchronise = True
        self._free: list[nn.Parameter] = []  # trained, and in no parallel module

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # in the precision that is trained with

    def setup(self, trainer: Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        _check(self.model, self.precision_plugin)
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if not self._parts():  # which an earlier run has made
            mixed = isinstance(self.precision_plugin, MixedPrecision)  # is planned for, outside of autocast
            with isolate_rng(), nullcontext() if mixed else self.precision_plugin.forward_context():
                self._split(trainer)
        inside = {id(p) for part in self._parts().values() for p in part.parameters()}
        self._free = [p for p in self.model.parameters() if p.requires_grad and id(p) not in inside]
        for p in self._free if self.world_size > 1 else ():
            dist.broadcast(p.data, 0)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm

    def _split(self, trainer: Trainer) -> None:
        """Makes the modules that are trained parallel, in a run without training all."""
        module, fitting = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        examples = self._examples if self._examples is not None else first_calls(trainer, first_batch(trainer))
        split = {
            path: part
            for path, part in ((path, module.get_submodule(path)) for path in examples)
            if any(p.requires_grad or not fitting for p in part.parameters())
        }
        _check_separate(module, split)
        keywords: Keywords = {
            **self._keywords,
            "autocast": AUTOCAST.get(getattr(self.precision_plugin, "precision", "")),
        }
        for path, part in split.items():
            made: ParallelModule = parallelize(part, examples[path], **keywords)
            if of(made).comm.size != self.world_size:
                raise LayerwiseError(
                    f"there are {of(made).comm.size} ranks: give Trainer as many devices (and num_nodes)"
                )
            for holder in list(module.modules()):
                holder._modules.update({name: made for name, child in holder._modules.items() if child is part})

    def _parts(self) -> dict[str, ParallelModule]:
        return dict(parallel_modules(self.lightning_module))

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self._parts().values():
                stack.enter_context(of(part).no_sync())
            stack.callback(setattr, self, "_synchronise", self._synchronise)
            self._synchronise = False
            yield

    def post_backward(self, closure_loss: Tensor) -> None:
        if self._synchronise and self.world_size > 1:
            for p in self._free:
                there = torch.tensor(p.grad is not None, dtype=torch.int32, device=p.device)
                dist.all_reduce(there)
                if there:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    dist.all_reduce(p.grad)
                    p.grad /= self.world_size

    def _clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Does what torch.nn.utils.clip_grad_norm_ does, also where only some gradients are DTensors."""
        params = [p for p in self.precision_plugin.main_params(optimizer) if p.grad is not None]
        kinds = [[p.grad for p in params if is_dtensor(p) == kind] for kind in (True, False)]
        norms: list[Any] = [get_total_norm(kind) for kind in kinds if kind]
        if norms:
            fulls = [norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]
            clip_grads_with_norm_(params, clip_val, torch.linalg.vector_norm(torch.stack(fulls)))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        parts = self._parts()
        with self._without(parts) as module:
            state: dict[str, Any] = dict(module.state_dict())
        for path, part in parts.items():
            state |= {f"{path}.{name}": value for name, value in of(part).full_state_dict().items()}
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        parts, rest = self._parts(), dict(checkpoint["state_dict"])
        for path, part in parts.items():
            own = {name: rest.pop(name) for name in list(rest) if name.startswith(f"{path}.")}
            part.load_state_dict({name.removeprefix(f"{path}."): value for name, value in own.items()}, strict)
            of(part).steps_done = checkpoint.get(STEPS, {}).get(path, of(part).steps_done)
        with self._without(parts) as module:
            module.load_state_dict(rest, strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return full_state(getattr(optimizer, "_optimizer", optimizer), self.lightning_module)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_full_state(optimizer, state, self.lightning_module)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        checkpoint[STEPS] = {path: of(part).steps_done for path, part in self._parts().items()}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def teardown(self) -> None:
        """Leaves the module on its device, unlike other strategies: its parts stay parallel."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @contextmanager
    def _without(self, parts: Mapping[str, ParallelModule]) -> Iterator[nn.Module]:
        """The module while empty ones stand for its parallel parts, whose states are their own."""
        module = self.lightning_module
        with ExitStack() as stack:
            for path, part in parts.items():
                parent, _, name = path.rpartition(".")
                modules = module.get_submodule(parent)._modules
                stack.callback(modules.__setitem__, name, part)
                modules[name] = nn.Module()
            yield module


def _check(module: nn.Module, plugin: Precision) -> None:
    """LayerwiseError for what says to train in another way, too."""
    if type(plugin) not in (Precision, MixedPrecision, DoublePrecision, HalfPrecision):
        raise LayerwiseError(
            f"{type(plugin).__name__} changes the layers that strategy='layerwise' splits: give Trainer one of "
            "precision='32-true', '64-true', '16-true', 'bf16-true', '16-mixed' and 'bf16-mixed'"
        )
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            raise LayerwiseError(
                f"module {name!r} is a {type(part).__name__}, and strategy='layerwise' splits it itself: leave the "
                "other out"
            )


def _check_separate(module: nn.Module, split: Mapping[str, nn.Module]) -> None:
    """LayerwiseError where parallel modules would share a parameter, or a module that is trained later is left out."""
    owners: dict[int, str] = {}
    for path, part in split.items():
        for name, p in part.named_parameters():
            full = f"{path}.{name}"
            if (other := owners.setdefault(id(p), full)) != full:
                raise LayerwiseError(f"modules share a parameter, {full!r} and {other!r}: call both from one module")
    for name, part in module.named_modules():
        seen = not name or any(f"{path}.".startswith(f"{name}.") or f"{name}.".startswith(f"{path}.") for path in split)
        computes = type(part).forward is not nn.Module.forward
        if not seen and computes and any(p.requires_grad for p in part.parameters(recurse=False)):
            raise LayerwiseError(f"module {name!r} is trained, and the first step does not call it: {EXAMPLES}")
