"""Small networks that use what real ones use."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> object:
        return self.function(*inputs)


class Residual(nn.Module):
    """A basic block of ResNet, ReLU and addition in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, padding_mode="reflect")
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding="same", bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv2(self.relu(self.bn1(self.conv1(x))))
        out += x
        return F.relu_(out)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.layers = nn.ModuleList([Residual(8), Residual(8)])
        self.again = self.layers[0]  # the same block once more
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.fc(torch.flatten(self.pool(self.again(x)), 1))


class SelfAttention(nn.Module):
    """As in Hugging Face's BERT and ViT: three linear layers, heads by view and transpose."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        y = y.transpose(1, 2).contiguous()
        return self.out(y.view(*y.size()[:-2], -1))


class EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """Word, position and type embeddings, a mask from the attention mask, two outputs."""

    def __init__(self, words: int = 30, width: int = 12, heads: int = 3, longest: int = 16) -> None:
        super().__init__()
        self.words, self.places, self.types = (nn.Embedding(n, width) for n in (words, longest, 2))
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList([EncoderBlock(width, heads) for _ in range(2)])
        self.pooler = nn.Linear(width, width)
        self.register_buffer("position_ids", torch.arange(longest).expand((1, -1)), persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        length = input_ids.size(1)
        types = torch.zeros(input_ids.shape, dtype=torch.long, device=input_ids.device)
        x = self.words(input_ids) + self.types(types) + self.places(self.position_ids[:, :length])
        x = self.norm(x)
        mask = None
        if attention_mask is not None:
            mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -1e4
        for block in self.blocks:
            x = block(x, mask)
        return {"last_hidden_state": x, "pooler_output": torch.tanh(self.pooler(x[:, 0]))}


class Conv1D(nn.Module):
    """GPT-2's linear layer, whose weight is (in, out)."""

    def __init__(self, out: int, width: int) -> None:
        super().__init__()
        self.nf = out
        self.weight, self.bias = nn.Parameter(torch.randn(width, out)), nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)
        self.c_fc, self.c_out = Conv1D(4 * width, width), Conv1D(width, 4 * width)
        self.register_buffer("bias", torch.tril(torch.ones(longest, longest, dtype=torch.bool))[None, None])

    def attention(self, x: Tensor) -> Tensor:
        n, s, c = x.shape
        q, k, v = (
            t.view(n, s, self.heads, c // self.heads).permute(0, 2, 1, 3)
            for t in self.c_attn(x).split(self.width, dim=2)
        )
        scores = torch.matmul(q, k.transpose(-1, -2)) / (c // self.heads) ** 0.5
        seen = self.bias[:, :, :s, :s]
        least = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
        weights = F.softmax(torch.where(seen, scores, least), dim=-1)
        return self.c_proj(torch.matmul(weights, v).permute(0, 2, 1, 3).reshape(n, s, c))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Learned positions, a causal mask as a buffer, the head tied to the embedding, its loss inside."""

    def __init__(self, words: int = 30, width: int = 12, heads: int = 3, longest: int = 16) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.h = nn.ModuleList([GptBlock(width, heads, longest) for _ in range(2)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        places = torch.arange(0, input_ids.size(1), dtype=torch.long, device=input_ids.device).unsqueeze(0)
        x = self.wte(input_ids) + self.wpe(places)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if labels is None:
            return (logits,)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1)), logits


class Vit(nn.Module):
    """Patches by convolution, a class token, learned positions."""

    def __init__(self, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 17, width))
        self.blocks = nn.Sequential(EncoderBlock(width, heads), EncoderBlock(width, heads))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.blocks(x)[:, 0])


class Swin(nn.Module):
    """A block of torchvision's Swin transformer: shifted windows, masked, and a table of relative positions."""

    def __init__(self, width: int = 8, heads: int = 2, window: int = 2) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads))
        grid = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        away = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("index", away[..., 0] * (2 * window - 1) + away[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        s, half = self.window, self.window // 2
        x = torch.roll(x, (-half, -half), (1, 2))
        x = x.view(n, h // s, s, w // s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, s * s, c)
        qkv = self.qkv(x).reshape(x.shape[0], s * s, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        bias = self.table[self.index.view(-1)].view(s * s, s * s, -1).permute(2, 0, 1).contiguous()
        scores = q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5 + bias.unsqueeze(0)
        regions, parts = x.new_zeros(h, w), (slice(0, -s), slice(-s, -half), slice(-half, None))
        for i, rows in enumerate(parts):
            for j, columns in enumerate(parts):
                regions[rows, columns] = 3 * i + j
        regions = regions.view(h // s, s, w // s, s).permute(0, 2, 1, 3).reshape(-1, s * s)
        mask = regions.unsqueeze(1) - regions.unsqueeze(2)
        mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
        windows = len(regions)
        scores = scores.view(x.size(0) // windows, windows, self.heads, s * s, s * s) + mask.unsqueeze(1).unsqueeze(0)
        weights = scores.view(-1, self.heads, s * s, s * s).softmax(-1)
        x = self.proj((weights @ v).transpose(1, 2).reshape(-1, s * s, c))
        x = x.view(n, h // s, w // s, s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        return torch.roll(x, (half, half), (1, 2))
