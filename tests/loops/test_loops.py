"""What training loops do, on two ranks against one device: equal numbers, or refused; and the page says which."""

import re
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.comm.pool import run_ranks
from tests.loops.loops import LOOPS, Loop
from tests.loops.setting import Setting

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "training_loops.md"
ROUGH = 2e-2  # of numbers that were rounded to 16 bits on the way
PRODUCTS_OF_16_BITS = {"muon"}
# With what words, by the kind of plan. What is not here works.
REFUSED: Mapping[str, Mapping[str, str]] = {
    "optimizer_of_before": {"split": "build the optimizer after parallelize returns"},
    "penalty_on_gradients": dict.fromkeys(("data", "split"), "it is a sum over ranks, which has no graph"),
    "of_parameters": {
        "data": "would return the gradient of this rank's samples only",
        "split": "torch.autograd.grad or backward(inputs=...) asked for the gradient",
    },
    "of_parameters_or_none": {
        "data": "would return the gradient of this rank's samples only",
        "split": "torch.autograd.grad or backward(inputs=...) asked for the gradient",
    },
    "transformed": dict.fromkeys(("data", "split"), "was called within a torch.func transform"),
    "some_inputs": {"split": "torch.autograd.grad or backward(inputs=...) asked for the gradient"},
    "some_inputs_twice": {"split": "torch.autograd.grad or backward(inputs=...) asked for the gradient"},
    "torch_save_by_one_rank": {"split": "shards, as torch.save(model.state_dict()) writes them"},
    "pickled": dict.fromkeys(("data", "split"), "the parallel model cannot be pickled"),
    "part_in_evaluation": {"split": "'training' of module 'head', set after the model was made parallel,"},
    "frozen_statistics": {"split": "'training' of module 'norm', set after the model was made parallel,"},
    "another_momentum": {"split": "'momentum' of module 'norm', set after the model was made parallel,"},
    "part_replaced": {
        "data": "the model's parameters or layers changed after it was made parallel",
        "split": "the parallel model's parameters, buffers or layers were replaced",
    },
    "pruned": {
        "data": "the model's parameters or layers changed after it was made parallel",
        "split": "layers was replaced or added, as prune and weight_norm do",
    },
    "parametrized": {
        "data": "the model's parameters or layers changed after it was made parallel",
        "split": "layers were replaced",
    },
    "pruning_removed": {"split": "layers was replaced or added, as prune and weight_norm do"},
    "pruned_again": {
        "split": "a tensor was used that the model's forward pass sets on a layer, as weight_norm and prune do"
    },
    "part_called": {"split": "a call or a hook of one of the model's layers is not supported"},
    "statistics_again": {"split": "'momentum' of module 'norm', set after"},
    "forward_hooks": {"split": "a call or a hook of one of the model's layers is not supported"},
    "hooks_of_all": {"split": "a global module hook (register_module_forward_hook or similar) is not supported"},
    "forward_hooks_of_before": {"split": "has a forward hook, which would not be called in training"},
    "unlike_modes": dict.fromkeys(("data", "split"), "is in training mode on ranks 0 and in evaluation mode on the"),
    "kept_loss": {"split": "'balance' of the parallel module is not supported if the plan splits layers"},
    "checkpointed": {"split": "torch.utils.checkpoint around the parallel model is not supported"},
    "checkpointed_norm": {"split": "moves running statistics of batch norms twice a step"},
    "function": {"split": "has an autograd function, Reversed, with its own backward pass"},
    "hook_inside": {"split": "registers a hook of a gradient in its forward"},
    "compiled": dict.fromkeys(("data", "split"), "torch.compile of the parallel model is not supported"),
    "ddp_of_a_holder": dict.fromkeys(
        ("data", "split"), "DistributedDataParallel wraps a module that holds the parallel model"
    ),
    "fully_shard_of_a_holder": {
        "data": "fully_shard",
        "split": "" if torch.__version__.startswith("2.11.") else "fully_shard",  # there PyTorch's words
    },
    "buffer_loaded": {"split": "buffer 'mean' changed after the model was made parallel"},
    "shared_layers": dict.fromkeys(("data", "split"), "put both models into one module and parallelize that"),
    "weights_of_losses": {
        "data": "got a gradient that differs between ranks",
        "split": "a parameter that the model's forward pass does not read was used outside it",
    },
    "ddp_around": dict.fromkeys(("data", "split"), "replaces DistributedDataParallel"),
}


@cache
def alone(loop: Loop) -> Mapping[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return loop(Setting())


def together(name: str, ranks: list[Any]) -> list[Any]:
    """What the ranks say of a number: one value, or one a rank."""
    values = [rank[name] for rank in ranks]
    if name.startswith("mean."):
        return [sum(values) / len(values)]
    return [torch.cat(values)] if name.startswith("rows.") else values


def check(name: str, value: Any, single: Any, *, rough: bool = False) -> None:
    if not isinstance(single, Tensor):
        assert value == single, name
        return
    assert value.shape == single.shape, name
    most = ROUGH if rough or name.startswith("rough.") else 1e-9
    difference = (value.double() - single.double()).abs().max().item() if single.numel() else 0.0
    assert difference <= most * max(1.0, single.double().abs().max().item()), (name, difference)


@pytest.mark.parametrize("kind", ["data", "split"])
@pytest.mark.parametrize("loop", LOOPS, ids=[loop.__name__ for loop in LOOPS])
def test_a_loop(loop: Loop, kind: str) -> None:
    ranks: list[Any] = run_ranks(2, "tests.loops.loops:run", loop.__name__, kind)
    words = REFUSED.get(loop.__name__, {}).get(kind)
    if words is not None:
        assert all(isinstance(rank, str) and words in rank for rank in ranks), ranks
        return
    assert not any(isinstance(rank, str) for rank in ranks), ranks
    single = alone(loop)
    assert single
    for name, value in single.items():
        for found in together(name, ranks):
            check(name, found, value, rough=kind != "data" and loop.__name__ in PRODUCTS_OF_16_BITS)


RECOMPUTED = [
    "clip_norm", "accumulation", "two_forwards", "gradient_penalty_with_batch_norm", "gradient_penalty", "gan",
    "deep_supervision", "output_of_some_ranks", "frozen_later", "evaluation", "autocast", "autocast_inside", "scaler",
    "other_sizes", "last_batches", "another_type", "adamw_fused", "optimizer_in_hooks", "ema", "copies", "dcp_resume",
]  # fmt: skip


SOON = {
    "recompute": RECOMPUTED[::5],
    "shared": ["accumulated_while_thawing", "optimizer_state", "two_losses", "gradient_penalty", "optimizer_in_hooks"],
    "fewer": ["clip_norm", "novograd", "dcp_resume", "full_model_state"],
}


def forms_of_split_plans() -> Iterator[object]:
    """Recomputed layers; sharded states and recomputed layers; layers on one of the ranks. Many are slow together."""
    by_name = {loop.__name__: loop for loop in LOOPS}
    works = [name for name in by_name if "split" not in REFUSED.get(name, {})]
    for kind, names in {"recompute": RECOMPUTED, "shared": works, "fewer": works}.items():
        for name in names:
            marks = () if name in SOON[kind] else pytest.mark.slow
            yield pytest.param(by_name[name], kind, marks=marks, id=f"{name}-{kind}")


@pytest.mark.parametrize(("loop", "kind"), forms_of_split_plans())
def test_a_loop_with_other_forms_of_layers(loop: Loop, kind: str) -> None:
    test_a_loop(loop, kind)


def test_the_page_has_every_row() -> None:
    """Under the heading of what becomes of it: `- what *(note)*`, or `| what | do instead |`."""
    first, works, half, refused = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:5]
    row = re.compile(r"^\| (.+?) \| [^|]*\|$", re.MULTILINE)
    page = dict.fromkeys(re.findall(r"^- (.+?)(?: \*\(.*\)\*)?$", works, re.MULTILINE), ("works", "works"))
    for section, became in ((half, ("works", "refused")), (refused, ("refused", "refused"))):
        page |= dict.fromkeys(row.findall(section)[1:], became)
    assert {page[what] for what in row.findall(first)[1:]} == {("works", "refused"), ("refused", "refused")}
    states = {
        (loop.__doc__ or "").strip(): tuple(
            "refused" if kind in REFUSED.get(loop.__name__, {}) else "works" for kind in ("data", "split")
        )
        for loop in LOOPS
    }
    assert page == states
