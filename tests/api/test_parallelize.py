"""parallelize: a user's loop, unchanged, gives the numbers of one device and of plain PyTorch."""

import json
from pathlib import Path

import onnx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import layerwise
from layerwise.comm.solo import SoloComm
from layerwise.config import Config
from layerwise.errors import LayerwiseError
from tests.api.keywords import keywords, quiet
from tests.api.ranks import loss_of_volumes, trained
from tests.api.script import BATCH, SEED, apart, data, network, plain, sgd, step, train
from tests.comm.launch import ROOT, launch
from tests.comm.pool import run_ranks


def test_a_script_on_two_ranks(tmp_path: Path) -> None:
    """Losses and states of two processes against plain PyTorch; the ranks build different models, rank 0's counts."""
    how = {"strategy": {"5": {"c": 2}, "7": {"k": 2}}}
    done = launch([str(ROOT / "tests/api/script.py"), str(tmp_path / "out"), json.dumps(how)])
    assert done.codes == [0, 0], done.stderr
    stdout = "".join(done.stdout)
    assert "Sequential on 2 × cpu" in stdout
    assert "{n=1, c=2}" in stdout
    assert " ".join(stdout.split()).count("data parallelism") == 1
    ranks = [load_file(tmp_path / f"out.{rank}") for rank in range(2)]
    model = network()
    losses = train(model, torch.utils.data.DataLoader(data(), BATCH))
    assert torch.stack([rank["losses"] for rank in ranks]).mean(0).tolist() == pytest.approx(losses, rel=1e-9)
    for rank in ranks:
        whole = {name.removeprefix("whole."): value for name, value in rank.items() if name.startswith("whole.")}
        assert apart(whole, model.state_dict()) <= 1e-9
        model.load_state_dict(whole, strict=True)
    for rank in ranks:
        assert tuple(rank["own.5.weight"].shape) == (6, 64)
        assert tuple(rank["own.7.weight"].shape) == (10, 6)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"strategy": "data"},
        {"strategy": "owt"},
        {"strategy": "model"},
        {"strategy": {"0": {"h": 2}, "7": {"k": 2}}},
    ],
    ids=["searched", "data", "owt", "model", "by hand"],
)
def test_the_numbers_are_plain_pytorchs(how: dict) -> None:
    ranks = run_ranks(2, "tests.api.ranks:trained", how | {"verbose": False})
    losses, state = plain()
    assert [sum(parts) for parts in zip(*(rank[0] for rank in ranks), strict=True)] == pytest.approx(losses, rel=1e-9)
    for _, whole, strategy, back in ranks:
        assert apart(whole, state) <= 1e-9
        assert back
        by_hand = how.get("strategy")
        if isinstance(by_hand, dict):
            assert {name: strategy[name] for name in by_hand} == by_hand
        elif by_hand == "data":
            assert set(map(str, strategy.values())) == {"{'n': 2}"}


def test_on_the_default_group_and_a_mesh() -> None:
    losses, state = plain(BATCH)
    ranks = run_ranks(2, "tests.api.ranks:on_the_default_group")
    assert sum(rank[0][0] for rank in ranks) / 2 == pytest.approx(losses[0], rel=1e-9)
    for _, whole, order, message in ranks:
        assert apart(whole, state) <= 1e-9
        assert order == (1, 0)
        assert "device_mesh has 3 dimensions" in message


def test_one_rank_is_plain_pytorch_bit_by_bit(capsys: pytest.CaptureFixture[str]) -> None:
    losses, whole, strategy, back = trained(SoloComm(), {})
    assert (losses, back) == (plain()[0], True)
    assert all(torch.equal(value, whole[name]) for name, value in plain()[1].items())
    assert set(map(str, strategy.values())) == {"{}"}
    assert "one rank, nothing to split" in capsys.readouterr().out


def test_a_plan_is_used_as_it_is(tmp_path: Path) -> None:
    model = layerwise.parallelize(network(), data().tensors[0][:4], **quiet(SoloComm()))
    model.plan.save(tmp_path / "plan.json")
    again = layerwise.parallelize(
        network(), data().tensors[0][:4], strategy=tmp_path / "plan.json", **quiet(SoloComm())
    )
    assert again.plan == model.plan
    assert isinstance(again.plan.strategy["0"], Config)


def test_fine_tuning() -> None:
    """The frozen stay, on every rank; gradients of the head alone travel. The optimizer may be given all parameters."""
    x, y = data(BATCH).tensors
    model = network()
    model[:5].requires_grad_(False)
    loss = step(model, x, y, sgd(model))
    for found, sent, whole in run_ranks(2, "tests.api.ranks:fine_tuned"):
        assert found == pytest.approx(loss, rel=1e-9)
        assert sent == 8 * (64 * 12 + 12 + 12 * 10 + 10)  # bytes: 2 (r - 1) / r a rank
        assert apart(whole, model.state_dict()) <= 1e-9


def test_the_element_type_of_what_is_used_twice() -> None:
    twice = nn.Linear(3, 3).double()
    model = layerwise.parallelize(nn.Sequential(twice, twice), torch.randn(2, 3, dtype=torch.float64))
    assert model.dtype == torch.float64


def test_fewer_samples_than_ranks_are_fed_whole() -> None:
    for message in run_ranks(2, "tests.api.ranks:whole_batch"):
        assert message == "free"


def test_where_the_loss_is_in_the_model_a_rank_takes_its_boxes_of_the_whole_batch() -> None:
    """Or it is given these alone: the losses are one device's, and no rank holds all of the batch."""
    expected = loss_of_volumes(SoloComm())[1]
    for io, losses, least in run_ranks(2, "tests.api.ranks:loss_of_volumes"):
        assert io == "boxes"
        assert losses == pytest.approx(expected, rel=1e-9)
        assert least < 1


def test_an_exported_program_trains_from_its_weights() -> None:
    """It begins with the module's values and learns what that learns."""
    example = data().tensors[0][:BATCH]
    program = torch.export.export(network().train(), (example,))
    losses, state = plain()
    found, whole, _, _ = trained(SoloComm(), {"verbose": False}, program)
    assert found == pytest.approx(losses, rel=1e-9)
    assert apart(whole, state) <= 1e-9


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"strategy": {"classifer": {"c": 2}}}, "names layer 'classifer', which the model does not have"),
        ({"strategy": {"6": {"c": 2}}}, "element-wise layers belong to the layer before them"),
        ({"strategy": {"5": {"c": 4}}}, "needs 4 devices, there are 1: start the script with torchrun"),
        ({"strategy": "date"}, "did you mean 'data'"),
        ({"memory_limit": 1000.0}, "memory_limit is 1000, which is 1000 bytes: write 1000GB"),
        ({"profile": "h1000"}, "did you mean h100"),
        ({"batch": 0}, "it must be at least 1"),
        ({"batch": 4.0}, "batch is 4.0; it must be at least 1, and a whole number"),
        ({"batch": True}, "batch is True"),
        ({"race": True}, "race is True; it must be at least 1, and a whole number"),
        ({"memory_limit": "1KB"}, "use more ranks or a smaller batch"),
        ({"memory_limit": -1}, "memory_limit is -1: it must be at least 1 B, and finite"),
        ({"memory_limit": "2GByte"}, "memory_limit is '2GByte': the unit 'GByte' is none of"),
        ({"strategy": "nothing.json"}, "nothing.json"),
        ({"device_mesh": "2x2"}, "device_mesh is '2x2'; it must be a DeviceMesh, a ProcessGroup or None"),
    ],
)
def test_wrong_arguments(how: dict, message: str) -> None:
    with pytest.raises(LayerwiseError, match=message):
        layerwise.parallelize(network(), data().tensors[0][:4], **keywords(how))


def test_wrong_inputs() -> None:
    for inputs in (None, (), "x", [[1.0]], torch.zeros(()), torch.zeros(0, 1, 8, 8)):
        with pytest.raises(LayerwiseError, match="example_inputs"):
            layerwise.parallelize(network(), inputs)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


def test_wrong_models() -> None:
    with pytest.raises(LayerwiseError, match="must not depend on data"):
        layerwise.parallelize(Branching(), torch.randn(2, 3), strategy="model")
    with pytest.raises(LayerwiseError, match="model is 7; it must be a Module, an ExportedProgram, a text or a path"):
        layerwise.parallelize(7, torch.randn(2, 3))
    with pytest.raises(LayerwiseError, match="gets int64, but its weights need floating-point numbers"):
        layerwise.parallelize(nn.Linear(3, 2), torch.ones(4, 3, dtype=torch.int64))
    with pytest.raises(LayerwiseError, match="already parallel"):
        layerwise.parallelize(layerwise.parallelize(nn.Linear(3, 2), torch.ones(4, 3)))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(LayerwiseError, match=r"within torch\.autocast.*before"):
        layerwise.parallelize(nn.Linear(3, 2), torch.ones(4, 3))
    mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    with pytest.raises(LayerwiseError, match=r"convert (all of the model to one type|its input)|torch\.export fails"):
        layerwise.parallelize(mixed, torch.randn(2, 3))


@pytest.mark.parametrize("how", [{"strategy": "data"}, {"strategy": {"5": {"c": 2}, "7": {"k": 2}}}])
def test_a_model_is_made_parallel_within_inference_mode(how: dict[str, object]) -> None:
    wanted = network(SEED).eval()(data(BATCH).tensors[0])
    found = run_ranks(2, "tests.api.ranks:predicted_within_inference_mode", how)
    assert float((torch.cat(found) - wanted).abs().max()) <= 1e-9


def test_a_model_that_was_built_within_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        built = nn.Linear(4, 2)
    with pytest.raises(LayerwiseError, match=r"'weight' was made within torch.inference_mode\(\): build the model"):
        layerwise.parallelize(built, torch.zeros(2, 4))


def test_a_plan_for_more_ranks_than_there_are(tmp_path: Path) -> None:
    (text, _) = run_ranks(2, "tests.api.ranks:plan_text")
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(LayerwiseError, match="the plan is for 2 ranks, there is 1: start the script with torchrun"):
        layerwise.parallelize(network(), data().tensors[0][:4], strategy=tmp_path / "plan.json")


def test_ranks_that_ask_for_different_things() -> None:
    example = data().tensors[0][:4]
    cases = {
        "strategy": ("data", "model"),
        "race": (1, 2),
        "optimizer": ("sgd", "adam"),
        "local_batch_norm": (True, False),
        "memory_limit": (None, 1e9),
        "measure_s": (0, 1.0),
        "profile": (None, "cpu"),
        "batch": (8, 16),
        "example_inputs": (example, example[:, :, :4]),
    }
    first, second = run_ranks(2, "tests.api.ranks:differently", cases)
    assert first == second
    assert [name for name in cases if f"the ranks differ in {name}" not in first[name]] == []


def test_an_onnx_file_trains_from_its_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    held = {name.replace(".", "_"): value.detach().numpy() for name, value in model.state_dict().items()}
    nodes = [
        onnx.helper.make_node("Gemm", ["x", "0_weight", "0_bias"], ["a"], transB=1),
        onnx.helper.make_node("Relu", ["a"], ["b"]),
        onnx.helper.make_node("Gemm", ["b", "2_weight", "2_bias"], ["y"], transB=1),
    ]
    shapes = {"x": (4, 6), "y": (4, 3)}
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in shapes.items())
    initial = [onnx.numpy_helper.from_array(value, name) for name, value in held.items()]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "mlp", [x], [y], initial)), tmp_path / "mlp.onnx")
    inputs, labels = torch.randn(4, 6), torch.randint(0, 3, (4,))
    made = layerwise.parallelize(tmp_path / "mlp.onnx", inputs)
    for one in (made, model):
        step(one, inputs, labels, torch.optim.SGD(one.parameters(), lr=0.5))
    state = {name.replace(".", "_"): value for name, value in model.state_dict().items()}
    assert apart(made.full_state_dict(), state) <= 1e-6
