"""Checkpoints: what is saved under one plan is loaded under another, bit for bit."""

import hashlib
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from layerwise import tensorfile
from layerwise.checkpoint import latest, load, model_digest, save
from layerwise.checkpoint.shards import ShardReader
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from tests.checkpoint.runs import OPTIMIZERS, UNTRAINED, alone, equal, gradients, resumed, saved, train, trained
from tests.examples import examples
from tests.run.cut_modules import CutModule, assembled, cutting, tensors


@examples(25)
@given(
    ranks=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    seeds=st.tuples(st.integers(0, 2**20), st.integers(0, 2**20)),
    kind=st.sampled_from(sorted(OPTIMIZERS)),
    steps=st.integers(0, 3),
)
def test_another_plan_loads_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, ranks: tuple[int, int], seeds: tuple[int, int], kind: str, steps: int
) -> None:
    folder, make = tmp_path_factory.mktemp("run"), OPTIMIZERS[kind]
    before = trained(folder, make, ranks[0], seeds[0], steps, torch.float32)
    after = resumed(folder, make, ranks[1], seeds[1], 0, torch.float32)
    assert equal(assembled(after), assembled(before))
    assert {module.steps_done for module in after} == {steps}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_same_plan_continues_bit_for_bit(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    make = OPTIMIZERS[kind]
    straight = trained(tmp_path / "a", make, 3, 5, 4, dtype)
    trained(tmp_path / "b", make, 3, 5, 2, dtype)
    assert equal(assembled(resumed(tmp_path / "b", make, 3, 5, 2, dtype)), assembled(straight))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_another_plan_continues_as_one_device(tmp_path: Path, kind: str) -> None:
    make = OPTIMIZERS[kind]
    straight = assembled(trained(tmp_path / "a", make, 1, 0, 4, torch.float64))
    trained(tmp_path / "b", make, 4, 1, 2, torch.float64)
    continued = assembled(resumed(tmp_path / "b", make, 5, 2, 2, torch.float64))
    for name, value in straight.items():
        torch.testing.assert_close(continued[name], value, rtol=1e-13, atol=1e-13)


def test_optimizer_is_restored(tmp_path: Path) -> None:
    """Settings, groups, and that a parameter has no state; what the new optimizer did before is forgotten."""
    module = alone()

    def make(lr: float) -> torch.optim.Optimizer:
        first, *others = module.parameters()
        return torch.optim.Adam([{"params": [first]}, {"params": others, "betas": (0.5, 0.6)}], lr=lr)

    optimizer = make(0.25)
    train(module, optimizer, 2)
    optimizer.param_groups[1]["lr"] = 1e-30
    expected = {name: optimizer.state[p] for name, p in module.named_parameters() if p in optimizer.state}
    save(tmp_path, module, optimizer, {})
    other = make(0.5)
    module.set_gradients({UNTRAINED: torch.ones(5)})
    other.step()
    load(tmp_path, module, other)
    assert [(group["lr"], group["betas"]) for group in other.param_groups] == [
        (0.25, (0.9, 0.999)),
        (1e-30, (0.5, 0.6)),
    ]
    found = {name: other.state[p] for name, p in module.named_parameters() if p in other.state}
    assert found.keys() == expected.keys() == gradients(0).keys()
    for name, state in expected.items():
        assert equal(found[name], state)
        assert {key: value.dtype for key, value in found[name].items()} == {k: v.dtype for k, v in state.items()}


def test_only_what_a_rank_owns_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, OPTIMIZERS["adam"], 4, 1, 1, torch.float32)
    read: Counter[str] = Counter()
    slices = ShardReader.slices

    class Recorder:
        """A tensor in a file: counts the elements that a thread takes out."""

        def __init__(self, *place: Any) -> None:
            self.inner = slices(*place)

        def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
            piece: Tensor = self.inner[part]
            read[threading.current_thread().name] += piece.numel()
            return piece

    monkeypatch.setattr(ShardReader, "slices", lambda *place: Recorder(*place))
    for module in resumed(tmp_path, OPTIMIZERS["adam"], 3, 2, 0, torch.float32):
        trained_here = [t for name, t in module.held.items() if name in gradients(0)]
        adam = sum(3 * tensor.numel() + 1 for tensor in trained_here)  # AMSGrad, and the number of the step
        held = sum(tensor.numel() for tensor in module.held.values())
        assert read[f"rank {module.comm.rank}"] == held + adam


def test_keeps_the_newest(tmp_path: Path) -> None:
    module = alone()
    assert latest(tmp_path / "none") is None
    for steps in (3, 1, 8, 9):
        module.steps_done = steps
        assert save(tmp_path, module, None, {"steps": steps}, keep=3) == tmp_path / f"step-{steps:08d}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000008", "step-00000009"]
    assert latest(tmp_path) == tmp_path / "step-00000009"
    module.steps_done = 2  # gone back, then saved: what was asked for last is never what goes
    save(tmp_path, module, None, {}, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000009"]
    assert load(tmp_path / "step-00000002", module) == {}
    assert module.steps_done == 2
    assert load(tmp_path, module) == {"steps": 9}
    assert module.steps_done == 9


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    saved(tmp_path, 0)
    saved(tmp_path, 5)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000007"]
    module = alone()
    load(tmp_path, module)
    assert equal(assembled([module]), tensors(5))


def test_digest_is_the_networks_whatever_its_batch(tmp_path: Path) -> None:
    saved(tmp_path)
    assert len({model_digest(f(load_model("lenet5", b))) for f in (fuse, lambda g: g) for b in (4, 32)}) == 1
    load(tmp_path, alone(layer_graph=fuse(load_model("mlp:4x3x2", 24))))
    with pytest.raises(LayerwiseError, match="same names and shapes, but other operators"):
        load(tmp_path, alone(layer_graph=load_model("mlp:4x5x2", 8)))


def test_torchs_own_reader_restores_the_optimizer(tmp_path: Path) -> None:
    """Its tensors; its settings are in the seal."""
    net = torch.nn.Linear(3, 2)
    whole = {name: t.detach() for name, t in net.state_dict().items()}
    module = CutModule(SoloComm(), whole, cutting(whole, 1, 0))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.25, betas=(0.5, 0.75))
    module.set_gradients({name: torch.ones_like(t) for name, t in whole.items()})
    optimizer.step()
    save(tmp_path, module, optimizer, {})
    other = torch.optim.AdamW(net.parameters())
    model, states = get_state_dict(net, other)
    read = {"model": model, "optimizer": {"state": states["state"]}}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(tmp_path / "step-00000000")), no_dist=True)
    set_state_dict(net, other, model_state_dict=model, optim_state_dict=states)
    assert equal(dict(other.state[net.bias]), dict(optimizer.state[module.held["bias"]]))
    seal = json.loads((tmp_path / "step-00000000" / "checkpoint.json").read_text())["about"]["optimizer"]
    assert [seal["groups"][0][key] for key in ("lr", "betas", "params")] == [0.25, [0.5, 0.75], ["weight", "bias"]]


def test_torchs_own_reader_knows_the_second_name_of_a_tied_parameter(tmp_path: Path) -> None:
    whole = {"up": torch.randn(3, 2)}
    save(tmp_path, CutModule(SoloComm(), whole, cutting(whole, 1, 0), aliases={"up": ("down",)}), None, {})
    found = {"up": torch.zeros(3, 2), "down": torch.zeros(3, 2)}
    reader = HuggingFaceStorageReader(str(tmp_path / "step-00000000"))
    dcp.load({"model": found}, storage_reader=reader, no_dist=True)
    assert torch.equal(found["down"], whole["up"])


def test_numbers_of_an_optimizer_are_restored(tmp_path: Path) -> None:
    """Plain ones, which torch.optim's own no longer have, infinite ones, text, none, and one in a tensor."""
    module = alone()

    def made() -> torch.optim.Optimizer:
        settings = {"growth": float("inf"), "rule": "a", "most": None, "pair": (1, -float("inf"))}
        return torch.optim.SGD([{"params": module.parameters(), **settings}], lr=torch.tensor(0.3))

    optimizer = made()
    bias = module.held["conv.bias"]
    assert isinstance(bias, torch.nn.Parameter)
    optimizer.state[bias] = {"count": 3, "best": float("inf"), "none": None, "on": True, "step": torch.tensor(2.0)}
    save(tmp_path, module, optimizer, {})
    other = made()
    other.param_groups[0].update(growth=1.0, rule="b", most=2, pair=(0, 0))
    other.param_groups[0]["lr"].fill_(9)
    load(tmp_path, module, other)
    settings = ("growth", "rule", "most", "pair", "lr")
    assert [other.param_groups[0][key] for key in settings] == [optimizer.param_groups[0][key] for key in settings]
    assert other.state[bias] == optimizer.state[bias]
    assert {key: type(value) for key, value in other.state[bias].items()} == {
        key: type(value) for key, value in optimizer.state[bias].items()
    }


def test_every_element_type(tmp_path: Path) -> None:
    """Empty, odd and 0-dimensional ones, as safetensors itself reads them; no other type is let through."""
    whole = {}
    for dtype in tensorfile.DTYPES:
        for shape in ((), (3,), (0, 2), (2, 3, 1)):
            bits = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
            whole[f"{dtype} {shape}"] = bits.view(dtype).reshape(shape)
    path = tmp_path / "all.safetensors"
    specs = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in whole.items()}
    digest = tensorfile.write_tensors(path, specs, lambda name: whole[name])
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    found = load_file(path)
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.items()} == specs
    for name, tensor in whole.items():
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    with pytest.raises(LayerwiseError, match="__metadata__"):
        tensorfile.write_tensors(path, {"__metadata__": ((), torch.bool)}, lambda name: torch.tensor(True))


def test_layouts_other_than_contiguous(tmp_path: Path) -> None:
    """A parameter in channels_last, and a buffer that is a view of something larger."""
    module = alone()
    nhwc = torch.randn(5, 3, 2, 3).contiguous(memory_format=torch.channels_last)
    module.held["conv.weight"], module.held["mask"] = torch.nn.Parameter(nhwc), torch.ones(5, 9).bool().T[::3]
    save(tmp_path, module, None, {})
    other = alone(1)
    load(tmp_path, other)
    assert torch.equal(other.held["conv.weight"], nhwc)
    load(tmp_path, module)
    assert module.held["conv.weight"].is_contiguous(memory_format=torch.channels_last)
    assert module.held["mask"].all()
