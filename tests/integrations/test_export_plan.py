"""layerwise export-plan: what other programs make of a plan has one device's numbers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import layerwise
from layerwise.__main__ import dispatch
from layerwise.comm.solo import SoloComm
from layerwise.config import Config
from layerwise.errors import LayerwiseError
from layerwise.export_plan import export_plan
from layerwise.graph.layer_graph import LayerGraph
from layerwise.plan import Plan
from tests.comm.pool import run_ranks
from tests.integrations.export_ranks import by_deepspeed, network, numbers

MLP = {"0": {"c": 2}, "2": {"k": 2}, "4": {"c": 2}, "5": {"k": 2}}


def planned(graph: LayerGraph, degrees: Mapping[str, Mapping[str, int]], model: str = "mlp") -> Plan:
    """A plan of these degrees, and samples split elsewhere."""
    fused = layerwise.fuse(graph)
    strategy = {layer.name: Config.of(degrees.get(layer.name, {})) for layer in fused.inner}
    assert degrees.keys() <= strategy.keys()
    return Plan(model, fused.digest, fused.batch, 2, 2, "free", True, strategy, provenance={"input_shape": None})


def mlp(degrees: Mapping[str, Mapping[str, int]]) -> tuple[Plan, LayerGraph]:
    graph = layerwise.from_torch(network(), (torch.randn(4, 6).double(),))
    return planned(graph, degrees), graph


def same(ranks: list[Any], wanted: tuple[float, dict[str, torch.Tensor]]) -> None:
    for loss, gradients in ranks:
        assert loss == pytest.approx(wanted[0], rel=1e-9)
        for name, gradient in wanted[1].items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("five", [{"k": 2}, {"n": 2}, {}], ids=str)
def test_pytorch_runs_it(five: dict[str, int]) -> None:
    text = export_plan(*mlp(MLP | {"5": five}), "parallelize_module")
    assert '"0": ColwiseParallel(),' in text
    assert '"2": RowwiseParallel(),' in text
    assert ('"4": ColwiseParallel(),' in text) == bool(five.get("k"))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).double()
    same(run_ranks(2, "tests.integrations.export_ranks:by_torch", text, x), numbers(network(), x))


def test_a_row_that_no_column_feeds_cuts_its_input() -> None:
    text = export_plan(*mlp({"2": {"k": 2}}), "parallelize_module")
    assert '"2": RowwiseParallel(input_layouts=Replicate()),' in text
    x = torch.ones(4, 6).double()
    same(run_ranks(2, "tests.integrations.export_ranks:by_torch", text, x), numbers(network(), x))


def test_transformers_runs_it(tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=8, use_cache=False,
    )  # fmt: skip
    model, ids = hf.LlamaForCausalLM(config).double().eval(), torch.randint(16, (2, 6))
    model.save_pretrained(tmp_path)
    graph = layerwise.from_torch(model, (ids,))
    inner, rows = layerwise.fuse(graph).inner, ("o_proj", "down_proj")
    linear = {layer.name for layer in inner if layer.name.endswith("_proj")}
    degrees = {name: {"k" if name.endswith(rows) else "c": 2} for name in linear}
    between = {layer.name for layer in inner if "self_attn" in layer.name and not layer.parameters}
    rules = json.loads(export_plan(planned(graph, degrees | {name: {"c": 2} for name in between}), graph, "tp_plan"))
    assert rules["model.layers.*.self_attn.q_proj"] == "colwise"
    assert rules["model.layers.*.mlp.down_proj"] == "rowwise"
    ranks = run_ranks(2, "tests.integrations.export_ranks:by_transformers", str(tmp_path), rules, ids)
    same(ranks, numbers(model, ids))


def test_deepspeed_has_it_by_patterns() -> None:
    section = json.loads(export_plan(*mlp({"0": {"c": 2}, "2": {"k": 2}}), "deepspeed"))["tensor_parallel"]
    assert section["autotp_size"] == 2
    assert section["partition_config"]["layer_specs"] == [
        {"patterns": ["^2\\.weight$"], "partition_type": "row"},
        {"patterns": ["^0\\.weight$"], "partition_type": "column"},
    ]


def test_deepspeed_runs_it() -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    section = json.loads(export_plan(*mlp({"0": {"c": 2}, "2": {"k": 2}}), "deepspeed"))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    wanted = by_deepspeed(SoloComm(), {}, x)
    for losses in run_ranks(2, "tests.integrations.export_ranks:by_deepspeed", section, x):
        assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("degrees", "form", "words"),
    [
        ({"3": {"c": 2}}, "tp_plan", r"there is 3 \{c=2\}"),
        ({}, "tp_plan", "nothing to export"),
        ({"0": {"c": 2}}, "deepspeed", "one split by rows follows, and 0 not so"),
    ],
)
def test_what_stands_in_the_way_is_named(degrees: Any, form: str, words: str) -> None:
    if "3" in degrees:
        graph = layerwise.load_model("lenet5", 4)
        plan = planned(graph, {"features.0": {"c": 2}, "classifier.0": {"c": 2}}, "lenet5")
        with pytest.raises(LayerwiseError, match=r"there is features.0 \{c=2\}"):
            export_plan(plan, graph, form)
        return
    with pytest.raises(LayerwiseError, match=words):
        export_plan(*mlp(degrees), form)


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = layerwise.load_model("mlp2", 4)
    names = [layer.name for layer in layerwise.fuse(graph).inner]
    planned(graph, {names[0]: {"c": 2}, names[1]: {"k": 2}}, "mlp2").save(tmp_path / "plan.json")
    assert dispatch(("export-plan", str(tmp_path / "plan.json"), "--as", "tp_plan")) == 0
    rules = json.loads(capsys.readouterr().out)
    assert list(rules.values()) == ["colwise", "rowwise"]
    out = tmp_path / "plan.py"
    assert dispatch(("export-plan", str(tmp_path / "plan.json"), "--as", "parallelize_module", "--out", str(out))) == 0
    assert "ColwiseParallel()" in out.read_text()
