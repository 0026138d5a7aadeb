"""Small models of Hugging Face's transformers, with random weights and random batches, and how the ranks train them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from layerwise.api.parallelize import parallelize
from layerwise.comm.base import Comm
from tests.api.keywords import keywords
from tests.traces import by_rank_0

BATCH, STEPS, WORDS, POSITIONS = 4, 2, 99, 12
Batch = Mapping[str, Tensor]

# One layer where two would be traced to no new purpose: tracing takes most of the time.
ENCODER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
PATCHES = ENCODER | {"image_size": 32, "patch_size": 8, "num_labels": 7}
TEXT = ENCODER | {"vocab_size": WORDS, "max_position_embeddings": 32}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 7}
UNMASKED = ", no mask"  # of a name: the texts are all of one length, and the model makes its masks by itself
CERTAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WINDOWS = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4}
GPT2 = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}

MODELS: dict[str, Callable[[], tuple[type, Any]]] = {
    "vit": lambda: (hf.ViTForImageClassification, hf.ViTConfig(**PATCHES, **CERTAIN)),
    "resnet": lambda: (
        hf.ResNetForImageClassification,
        hf.ResNetConfig(embedding_size=8, layer_type="basic", **STAGES),
    ),
    "swin, drop path": lambda: (
        hf.SwinForImageClassification,
        hf.SwinConfig(num_labels=7, drop_path_rate=0.5, **WINDOWS | {"depths": [1, 1]}),
    ),
    "bert, dropout": lambda: (hf.BertForSequenceClassification, hf.BertConfig(num_labels=7, **TEXT)),
    "gpt2": lambda: (hf.GPT2LMHeadModel, hf.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **GPT2)),
    "mistral": lambda: (hf.MistralForCausalLM, hf.MistralConfig(num_key_value_heads=2, sliding_window=5, **TEXT)),
    "mixtral": lambda: (
        hf.MixtralForCausalLM,  # whose experts, sorted, PyTorch has no kernel for in float64
        hf.MixtralConfig(num_key_value_heads=2, num_local_experts=3, experts_implementation="eager", **TEXT),
    ),
    "t5": lambda: (hf.T5ForConditionalGeneration, hf.T5Config(decoder_start_token_id=0, **T5)),
}
VISION = ("vit", "resnet", "swin")
LANGUAGE = ("gpt2", "t5", "mistral", "mixtral")


def build(name: str, attention: str, seed: int = 0) -> nn.Module:
    """The model in float64, in training, with random values everywhere: zeros and ones would tell little."""
    torch.manual_seed(seed)
    kind, config = MODELS[name.removesuffix(UNMASKED)]()
    if name != "resnet":
        config._attn_implementation = attention
    model: nn.Module = kind(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model.double().train()


def batches(name: str, *, labels: bool) -> list[Batch]:
    """Of every step. Texts differ in length: what is padded is masked, and the loss leaves it out."""
    torch.manual_seed(1)
    given = [_batch(name.partition(",")[0], labels=labels) for _ in range(STEPS)]
    if name.endswith(UNMASKED):
        return [{key: value for key, value in batch.items() if key != "attention_mask"} for batch in given]
    return given


def _batch(name: str, *, labels: bool) -> Batch:
    classes = torch.randint(0, 7, (BATCH,))
    if name in VISION:
        return {"pixel_values": torch.randn(BATCH, 3, 32, 32).double()} | ({"labels": classes} if labels else {})
    mask = (torch.arange(POSITIONS) < torch.tensor([12, 7, 10, 4])[:, None]).long()
    given = {"input_ids": torch.randint(2, WORDS, (BATCH, POSITIONS)) * mask + 1 - mask, "attention_mask": mask}
    if name in LANGUAGE:
        words = torch.randint(0, 7, (BATCH, POSITIONS))
        return given | ({"labels": words.masked_fill(mask == 0, -100)} if labels else {})
    return given | ({"labels": classes} if labels else {})


def objective(returned: Any, *, labels: bool) -> Tensor:
    """The model's own loss, or one of what it returns."""
    loss: Tensor = returned.loss if labels else returned.logits.square().mean()
    return loss


def plain(name: str, attention: str, *, labels: bool) -> tuple[list[float], dict[str, Tensor]]:
    """What PyTorch makes of the same batches."""
    with in_float64():
        model = build(name, attention)
        return steps(model, batches(name, labels=labels), labels=labels), model.state_dict()


def trained(
    comm: Comm, name: str, attention: str, labels: bool, how: Mapping[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    """A rank's losses, and the whole state; the ranks build different models, rank 0's counts."""
    with in_float64():
        all_of = batches(name, labels=labels)
        share = {key: value[: BATCH // comm.size] for key, value in all_of[0].items()}
        options = keywords(how, comm=comm, verbose=False)
        with by_rank_0(comm):
            model = parallelize(build(name, attention, comm.rank), share, **options)
        mine = [{key: value[model.share()] for key, value in batch.items()} for batch in all_of]
        return steps(model, mine, labels=labels), model.full_state_dict()


def steps(model: nn.Module, given: list[Batch], *, labels: bool) -> list[float]:
    """A loss a step of SGD with momentum, and one in evaluation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for batch in given:
        optimizer.zero_grad()
        loss = objective(model(**batch), labels=labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(objective(model(**given[0]), labels=labels).item())
    return losses


@contextmanager
def in_float64() -> Iterator[None]:
    """These models compute norms, softmax and losses in float32, whatever their type; here in float64, as all else.

    Rounding to float32 would hide errors below 1e-7.
    """
    short, to, softmax = Tensor.float, Tensor.to, nn.functional.softmax

    def kept(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.dtype is not torch.float64:
            return to(x, *args, **kwargs)
        args = tuple(a for a in args if a is not torch.float32)
        kwargs = {key: value for key, value in kwargs.items() if value is not torch.float32}
        return to(x, *args, **kwargs) if args or kwargs else x

    def soft(x: Tensor, dim: int, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        return softmax(x, dim, dtype=None if x.dtype is torch.float64 else dtype, **kwargs)

    Tensor.float = lambda x, *_, **__: x if x.dtype is torch.float64 else short(x)  # type: ignore[method-assign]
    Tensor.to, nn.functional.softmax = kept, soft  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Tensor.float, Tensor.to, nn.functional.softmax = short, to, softmax  # type: ignore[method-assign]
