"""GPT-2 in PyTorch's own modules (Radford et al., Language Models are Unsupervised Multitask Learners, 2019).

Without dropout; the head's weight is not the embedding's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Block(nn.Module):
    """Attention over what came before and a perceptron, each beside the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        parts = self.attention(self.norm_1(x)).view(samples, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(samples, tokens, width))
        result: Tensor = x + self.outer(gelu(self.inner(self.norm_2(x))))
        return result


class Gpt2(nn.Module):
    """By default that of 24 layers (355 million parameters, with a head of its own 406)."""

    def __init__(
        self, layers: int = 24, width: int = 1024, heads: int = 16, tokens: int = 1024, words: int = 50257
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(tokens, width))
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) + self.places
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


def gpt2() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """24 layers, for planning: without values."""
    with torch.device("meta"):
        return Gpt2(), (torch.zeros(2, 1024, dtype=torch.long),)


def llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A Llama of 24 layers and 1.3 billion parameters (Hugging Face's modules), for planning: without values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=8,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config), (torch.zeros(2, 1024, dtype=torch.long),)
