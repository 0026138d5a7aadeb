"""parallelize on models of Hugging Face: the numbers of one device, or one clear sentence."""

import copy

import pytest
import torch

import layerwise
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.graph.fuse import fuse
from layerwise.importers.load import network_of
from layerwise.run.load import load
from tests.api.keywords import keywords
from tests.api.script import apart
from tests.comm.pool import run_ranks
from tests.comm.thread import run_threads
from tests.run.plans import random_plan

hf = pytest.importorskip("transformers")

from tests.api import hugging_face  # noqa: E402 (needs transformers)
from tests.api.hugging_face import build, plain, trained  # noqa: E402

# One of each kind; `python -m benchmarks.zoo` has seventy more.
CASES = [
    ("resnet", "eager", True, {}),
    ("gpt2", "sdpa", True, "model"),
    ("t5", "eager", True, "data"),
    ("mistral, no mask", "sdpa", False, {"model.layers.0.mlp.down_proj": {"k": 2}}),
    ("mixtral, no mask", "sdpa", True, {"model.layers.0.self_attn.o_proj": {"c": 2}}),
]


@pytest.mark.parametrize(
    ("name", "attention", "labels", "strategy"), CASES, ids=[f"{c[0]}-{c[1]}-{list(c[2:])}" for c in CASES]
)
def test_two_ranks_have_the_numbers_of_plain_pytorch(name: str, attention: str, labels: bool, strategy: object) -> None:
    """The loss inside the model counts the targets of all ranks: their texts differ in length."""
    losses, state = plain(name, attention, labels=labels)
    ranks = run_ranks(2, "tests.api.hugging_face:trained", name, attention, labels, {"strategy": strategy or None})
    assert [sum(parts) / 2 for parts in zip(*(rank[0] for rank in ranks), strict=True)] == pytest.approx(losses, 1e-9)
    for _, whole in ranks:
        assert {key: value.shape for key, value in whole.items()} == {key: value.shape for key, value in state.items()}
        assert apart(whole, state) <= 1e-9


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("bert, dropout", {"bert.encoder.layer.0.intermediate.dense": {"c": 2}}),
        pytest.param("swin, drop path", "data", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_drop_what_one_drops(name: str, strategy: object) -> None:
    losses, state = trained(SoloComm(), name, "eager", True, {})
    assert losses != pytest.approx(plain(name, "eager", labels=True)[0], rel=1e-3)  # other draws than PyTorch's
    ranks = run_ranks(2, "tests.api.hugging_face:trained", name, "eager", True, {"strategy": strategy})
    assert [sum(parts) / 2 for parts in zip(*(rank[0] for rank in ranks), strict=True)] == pytest.approx(losses, 1e-9)
    for _, whole in ranks:
        assert apart(whole, state) <= 1e-9


def test_a_model_returns_what_it_returned() -> None:
    """With the cache of keys and values; its configuration stays as it was."""
    model = build("gpt2", "sdpa")
    (batch, *_) = hugging_face.batches("gpt2", labels=True)
    made = layerwise.parallelize(model, dict(batch))
    assert model.config.use_cache
    returned, own = made(**batch), model(**batch)
    assert type(returned) is type(own)
    torch.testing.assert_close(returned.logits, own.logits)
    assert own.past_key_values is not None
    assert returned.past_key_values is not None


def test_routing_by_data_is_run_token_by_token() -> None:
    """Which experts a token goes to is known in the step only; the model itself sorts all tokens by their experts."""
    config = hf.MixtralConfig(**hugging_face.TEXT, num_key_value_heads=2, num_local_experts=2)
    torch.manual_seed(0)
    model, ids = hf.MixtralForCausalLM(config), torch.randint(0, hugging_face.WORDS, (2, 12))
    network = network_of(model, (), 2, "mixtral", {"input_ids": ids})
    graph = fuse(network.graph)
    assert model.config._experts_implementation == "grouped_mm"
    assert not any(layer.whole for layer in graph.inner)
    plan = random_plan(graph, 2, 1, "free")

    def logits(comm: Comm) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = load(plan, network, comm=comm)(ids).logits
        return found

    with torch.no_grad():
        wanted = model(ids).logits
    for found in run_threads(2, logits):
        torch.testing.assert_close(found, wanted)


def test_a_split_plan_generates_the_text_of_one_device() -> None:
    """Without the cache of keys and values, which the layers were traced without, whatever the call says."""
    model = build("gpt2", "sdpa").eval()
    ids = torch.randint(0, hugging_face.WORDS, (2, 6))
    wanted = model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)

    def generated(comm: Comm) -> torch.Tensor:
        own = copy.deepcopy(model)
        how = {"strategy": {"transformer.h.0.mlp.c_fc": {"c": 2}}}
        made = layerwise.parallelize(own, {"input_ids": ids}, **keywords(how, comm=comm, verbose=False))
        text: torch.Tensor = made.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
        return text

    for text in run_threads(2, generated, timeout_s=240.0):
        assert torch.equal(text, wanted)
