"""Damaged .pt2 files: read as they were, or refused in one line."""

import random
import re
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.importers.load import Network, load_network
from tests.importers.torch.read.test_load_pt2 import altered


class Small(nn.Module):
    """Weights, buffers, constants, several outputs of a call, a write into a part."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(64, 4)
        self.register_buffer("shift", torch.arange(4.0))
        self.scale = torch.full((4,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        y = torch.max_pool2d(x, 2)
        mask = torch.zeros(4)
        mask[1:3] = self.shift[:2]
        return torch.cat([self.fc(y.flatten(1)) * self.scale + self.shift + mask, y.mean((2, 3))], 1)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pt2") / "m.pt2"
    torch.export.save(torch.export.export(Small(), (torch.randn(6, 3, 8, 8),)), path)
    return path


def read(path: Path) -> tuple[Network, dict[str, Tensor]] | None:
    """The network and its values; None where the file is refused, in one line."""
    try:
        network = load_network(str(path), 6)
        found = {name: network.value(name) for name in network.keys}
    except LayerwiseError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return None
    return network, {name: value for name, value in found.items() if isinstance(value, Tensor)}


def test_flipped_bits_are_noticed_or_harmless(good: Path, tmp_path: Path) -> None:
    """Half of them in the zip's directory, at the end, where every bit means something."""
    content, dice = good.read_bytes(), random.Random(14)
    whole = read(good)
    assert whole is not None
    path, refused = tmp_path / "m.pt2", 0
    for trial in range(300):
        at = dice.randrange(len(content)) if trial % 2 else len(content) - 1 - dice.randrange(3000)
        damaged = bytearray(content)
        damaged[at] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        found = read(path)
        refused += found is None
        if found is not None:
            assert found[0].graph.digest == whole[0].graph.digest, at
            assert found[1].keys() == whole[1].keys(), at
            assert all(torch.equal(found[1][name], value) for name, value in whole[1].items()), at
    assert 100 < refused < 300


@pytest.mark.parametrize(
    ("member", "trials"),
    [
        ("models/model.json", 150),
        ("weights/model_weights_config.json", 40),
        ("constants/model_constants_config.json", 10),
    ],
)
def test_other_digits_make_another_network_or_a_clear_error(member: str, trials: int, good: Path) -> None:
    with zipfile.ZipFile(good) as archive:
        name = next(n for n in archive.namelist() if n.endswith(member))
        text = archive.read(name)
    if "models" in member:  # the graph: what follows it is for people and for other tools
        first, last = text.index(b'"graph_module"'), text.index(b'"module_call_graph"')
    else:
        first, last = 0, len(text)
    places = [m.start() for m in re.finditer(rb"\d", text) if first < m.start() < last]
    dice, refused = random.Random(14), 0
    for _ in range(trials):
        at, digit = dice.choice(places), dice.choice(b"0123456789").to_bytes(1)
        changed = text[:at] + digit + text[at + 1 :]
        refused += read(altered(good, lambda n, c, changed=changed: changed if n == name else c)) is None  # type: ignore[misc]
    assert 0 < refused < trials


def test_numbers_that_are_none_in_a_member_are_refused(good: Path) -> None:
    for number in ("1e999", "NaN", "1" + "0" * 400):
        minor = f'"minor": {number}, "other": '.encode()
        file = altered(good, lambda name, text, minor=minor: text.replace(b'"minor":', minor))  # type: ignore[misc]
        with pytest.raises(LayerwiseError, match=r"member 'models/model.json' is not JSON"):
            load_network(str(file), 6)


def test_a_member_that_is_empty_is_named(good: Path) -> None:
    """Of a constant, too: it was told that the model is on the meta device, and only when it was run."""
    for emptied in ("constants/tensor_0", "weights/weight_0"):
        file = altered(good, lambda name, text, emptied=emptied: b"" if name.endswith(emptied) else text)  # type: ignore[misc]
        with pytest.raises(LayerwiseError, match=rf"member 'data/{emptied}' is damaged: it is empty"):
            load_network(str(file), 6).value("conv.weight")
