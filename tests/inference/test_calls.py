"""Law: a decoder that is called chunk by chunk, with a cache in between, gives one device's video on every rank."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from tests.comm.thread import run_threads

LIMIT = "100kB"
LATENT = torch.randn(1, 2, 4, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Causal(nn.Conv3d):
    """A convolution over two frames before each, of which the first chunk has none."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=(0, 1, 1))

    def on(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        x = torch.cat([x.new_zeros(*x.shape[:2], 2, *x.shape[3:]) if past is None else past, x], 2)
        return self(x), x[:, :, -2:]


class Writes(nn.Module):
    """A decoder that writes into a list which it is given; the second chunk is told by a word, as in Wan's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.time, self.last = Causal(2, 4), nn.Conv3d(4, 8, 1), Causal(4, 3)

    def forward(self, x: Tensor, cache: list[Any], place: list[int]) -> Tensor:
        x, cache[0] = self.first.on(x, cache[0])
        if cache[1] is None:
            cache[1] = "Rep"
        else:
            kept = x if cache[1] == "Rep" else x + cache[1]
            x, cache[1] = torch.stack(self.time(x).chunk(2, 1), 3).flatten(2, 3), kept
        x, cache[2] = self.last.on(torch.relu(x), cache[2])
        place[0] += 3
        return x


class Returns(nn.Module):
    """A decoder that returns its cache as a dict, as CogVideoX's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Causal(2, 4), Causal(4, 3)

    def forward(self, x: Tensor, cache: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
        past, new = cache or {}, dict[str, Any]()
        x, new["first"] = self.first.on(x, past.get("first"))
        new["unread"] = x.clone()  # as CogVideoX's layers of one frame do
        x, new["last"] = self.last.on(torch.relu(x), past.get("last"))
        return x, new


class Vae:
    """What calls a decoder."""

    cache: Any

    def __init__(self, kind: type[nn.Module]) -> None:
        torch.manual_seed(0)
        self.decoder: Any = kind().double().eval()

    @torch.no_grad()
    def decode(self, z: Tensor) -> Tensor:
        writes = isinstance(self.decoder, Writes)
        frames, self.cache = list[Tensor](), [None] * 3 if writes else None
        for i in range(z.shape[2]):
            if writes and i % 2:
                frames.append(self.decoder(place=[0], cache=self.cache, x=z[:, :, i : i + 1]))
            elif writes:
                frames.append(self.decoder(z[:, :, i : i + 1], self.cache, [0]))
            else:
                frame, self.cache = self.decoder(z[:, :, i : i + 1], cache=self.cache)
                frames.append(frame)
        return torch.cat(frames, 2)


class Keeps(nn.Module):
    """A decoder that keeps its cache itself, as MAGVIT's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Causal(2, 4)
        self.past: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x, self.past = self.first.on(x, self.past)
        return x


def test_a_decoder_that_keeps_its_cache_itself_is_refused_by_name() -> None:
    model = nn.Sequential(Keeps().eval())
    with pytest.raises(LayerwiseError, match="module '0' keeps something in its attribute 'past' from call to call"):
        layerwise.parallelize(model, lambda: model(LATENT.float()), inference=True)


@pytest.mark.parametrize("kind", [Writes, Returns])
def test_every_rank_decodes_the_video_of_one_device(kind: type[nn.Module]) -> None:
    longer = torch.cat([LATENT, LATENT.flip(2)], 2)
    one_device = Vae(kind)

    def decoded(comm: Comm) -> tuple[Tensor, Tensor]:
        vae = copy.deepcopy(one_device)  # threads would draw from one generator
        layerwise.parallelize(
            vae.decoder,
            lambda: vae.decode(LATENT),
            inference=True,
            strategy={"first": {"h": 2}, "last": {"w": 2}},
            options=layerwise.ParallelOptions(comm=comm, measure_s=0, verbose=False),
        )
        video = vae.decode(LATENT)
        caches = list(vae.cache.values()) if isinstance(vae.cache, dict) else vae.cache
        if kind is Returns:
            assert vae.cache["unread"].local.numel() == 0  # state that no call reads is nowhere
        here = sum(x.local.numel() for x in caches)
        assert here < sum(x.numel() for x in caches)  # no rank holds all of the cache
        for compute in (
            lambda x: 2 * x,
            Tensor.zero_,
            Tensor.clone,
            lambda x: x[:, :, :1],
            lambda x: torch.stack([x]),
        ):
            with pytest.raises(LayerwiseError, match="only the model can compute with what it keeps"):
                compute(caches[0])
        assert copy.deepcopy(caches)[0].local is caches[0].local
        for act, refused in ((copy.deepcopy, "copy it"), (nn.Module.float, "convert it")):
            with pytest.raises(LayerwiseError, match=f"for several unlike calls: {refused} before"):
                act(vae.decoder)
        with pytest.raises(LayerwiseError, match="the ranks feed different values, but each must feed the same"):
            vae.decode(LATENT + comm.rank)
        with pytest.raises(LayerwiseError, match=r"as it was not when it was made parallel: x \(1, 2, 1, 8, 4\)"):
            vae.decode(LATENT[..., :4])
        if kind is Writes:
            with pytest.raises(LayerwiseError, match="as it was not when it was made parallel"):
                vae.decoder(LATENT[:, :, :1], (None,) * 3, [0])  # a tuple, which nothing can be written into
        return video, vae.decode(longer)

    for video, other in run_threads(2, decoded):
        torch.testing.assert_close(video, one_device.decode(LATENT), rtol=0, atol=1e-12)
        torch.testing.assert_close(other, one_device.decode(longer), rtol=0, atol=1e-12)


def test_the_largest_video_is_one_that_ranks_plan_within_the_memory() -> None:
    """All calls count, and the video that every rank is returned; a step more is said not to fit."""
    vae, unused = Vae(Writes), Vae(Writes)

    def decode(height: int = 8) -> Tensor:
        return vae.decode(LATENT[:, :, :3, :1, :1].expand(1, 2, 3, height, 8))

    said, alone = (layerwise.memory(vae.decoder, decode, gpus=n, inference=True, memory_limit=LIMIT) for n in (2, 1))
    assert said.size is not None
    assert alone.size is not None
    assert said.size.fits is not None
    assert said.size.beyond is not None
    assert alone.size.fits is not None
    largest = said.size.fits.number
    assert said.size.fits.bytes <= 100e3 < said.size.beyond.bytes
    assert said.size.beyond.number - largest <= largest / 32 + 1
    assert largest > 4 / 3 * alone.size.fits.number  # the video itself is on every rank
    assert said.seconds is not None
    assert said.seconds > 0
    assert f"height={largest}" in str(said)
    video = 3 * 5 * largest * 8 * 8  # channels, frames (one of the first chunk, two of each other), float64

    def planned(comm: Comm) -> float:
        model, latent = copy.deepcopy(unused), LATENT.new_zeros(1, 2, 3, largest, 8)
        run = layerwise.parallelize(
            model.decoder,
            lambda: model.decode(latent),
            inference=True,
            memory_limit=f"{100e3 - video:.0f}B",
            options=layerwise.ParallelOptions(comm=comm, measure_s=0, verbose=False),
        )
        calls = layerwise.of(run).calls
        return 0.0 if calls is None else calls.memory_bytes

    assert max(run_threads(2, planned)) <= 100e3 - video
    with pytest.raises(LayerwiseError, match="calls the model in inference"):
        layerwise.memory(vae.decoder, decode)
    with pytest.raises(LayerwiseError, match="'height', the size that the function is called with, needs a default"):
        layerwise.memory(vae.decoder, lambda height: vae.decode(height), inference=True)


def test_ranks_whose_functions_make_other_calls_are_told_so() -> None:
    def made(comm: Comm) -> None:
        vae = Vae(Returns)
        options = layerwise.ParallelOptions(comm=comm, measure_s=0, verbose=False)
        frames = LATENT[:, :, : 1 + comm.rank]
        layerwise.parallelize(vae.decoder, lambda: vae.decode(frames), inference=True, options=options)

    with pytest.raises(LayerwiseError, match="calls of the model"):
        run_threads(2, made)
