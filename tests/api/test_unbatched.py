"""Models whose samples are items of lists, or that take no tensor, run as under DistributedDataParallel."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerwise.api.parallelize import parallelize
from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.importers.torch.read.arguments import listed_samples
from tests.api.keywords import keywords
from tests.comm.thread import run_threads
from tests.run.plans import difference

Item = tuple[Tensor, dict[str, Tensor]]


class Detector(nn.Module):
    """torchvision's convention: in training a dict of losses of images and targets, in evaluation a dict an image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        found = self.head(self.norm(torch.stack([self.stem(image[None]).relu().mean((2, 3))[0] for image in images])))
        if targets is None:
            return [{"boxes": x} for x in found]
        each = [(x - target["boxes"]).abs().mean() for x, target in zip(found, targets, strict=True)]
        return {"boxes": torch.stack(each).mean(), "size": found.pow(2).mean()}


class Words(nn.Module):
    """It is called with texts and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 3)

    def forward(self, texts: list[str], power: int) -> Tensor:
        rows = [self.words(torch.tensor([len(word) for word in text.split()])).mean(0) for text in texts]
        return torch.stack(rows).pow(power).mean()


def items(count: int, seed: int) -> list[Item]:
    drawn = torch.Generator().manual_seed(seed)
    sizes = torch.randint(4, 9, (count, 2), generator=drawn).tolist()

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=drawn, dtype=torch.float64)

    return [(random(3, h, w), {"boxes": random(1 + i, 4)}) for i, (h, w) in enumerate(sizes)]


def detect(model: nn.Module, batches: list[list[Item]]) -> tuple[dict[str, Tensor], Any]:
    """A step a batch; the weights, and what it finds in evaluation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        images, targets = zip(*batch, strict=True)
        optimizer.zero_grad()
        sum(model(list(images), list(targets)).values()).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        found = model([image for image, _ in batches[0]])
    return {name: value.clone() for name, value in model.state_dict().items()}, found


@pytest.mark.parametrize("strategy", [None, "data"])
def test_images_of_different_sizes_with_a_list_of_targets(
    strategy: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every rank feeds a list of its own, of another length, too: the numbers are those of one device with all."""
    torch.manual_seed(0)
    module = Detector().double()
    batches = [items(5, 0), items(3, 1), items(4, 2)]
    cut = [[batch[:2] for batch in batches], [batch[2:] for batch in batches]]
    wanted, _ = detect(copy.deepcopy(module), batches)

    def rank(comm: Comm) -> tuple[dict[str, Tensor], Any, int]:
        images, targets = zip(*cut[comm.rank][0], strict=True)
        how = keywords({"strategy": strategy}, comm=comm)
        model = parallelize(copy.deepcopy(module), (list(images), list(targets)), **how)
        return *detect(model, cut[comm.rank]), model.plan.batch

    for number, (state, found, batch) in enumerate(run_threads(2, rank, timeout_s=30)):
        assert all(difference(value, wanted[name]) <= 1e-12 for name, value in state.items())
        assert len(found) == len(cut[number][0])
        assert batch == 5
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("samples alone are split, because its samples are the items of lists") == 1


def test_inputs_without_a_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    module = Words().double()
    texts = [["a bb ccc", "dd"], ["eeee a ff"]]
    whole = copy.deepcopy(module)
    (sum(whole(text, 2) for text in texts) / 2).backward()

    def rank(comm: Comm) -> Tensor:
        model = parallelize(copy.deepcopy(module), (texts[comm.rank], 2), **keywords({}, comm=comm))
        for _ in range(2):
            model.zero_grad()
            model(texts[comm.rank], 2).backward()
        made: Tensor = model.words.weight.grad
        return made

    for gradient in run_threads(2, rank, timeout_s=30):
        assert difference(gradient, whole.words.weight.grad) <= 1e-12
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("its inputs hold no tensor, of which samples could be cut or counted") == 1


def test_lists_are_split_no_further() -> None:
    images, targets = zip(*items(3, 0), strict=True)
    with pytest.raises(LayerwiseError, match=r"items of lists.*strategy='data' runs the model as it is written"):
        parallelize(Detector().double(), (images, targets), **keywords({"strategy": "owt"}, verbose=False))


IMAGES, SQUARES = [torch.zeros(3, 4, 4)] * 3, [torch.zeros(3, n, n) for n in (4, 5)]


@pytest.mark.parametrize(
    ("arguments", "samples"),
    [
        ([SQUARES, [{}, {}]], SQUARES),
        ([tuple(SQUARES), ({}, {})], tuple(SQUARES)),
        ([(800, 800), IMAGES, [{}] * 3], IMAGES),
        ([[{}, {}]], [{}, {}]),
        ([[torch.zeros(8, 10), torch.zeros(())]], None),  # a structure
        ([tuple(IMAGES)], None),
        ([torch.zeros(8, 4), [torch.zeros(8, 10), torch.zeros(1, 10)]], None),  # the rows of the first
        ([["a", "b"]], None),
    ],
)
def test_which_lists_are_samples(arguments: list[Any], samples: Any) -> None:
    assert listed_samples(arguments) is samples or listed_samples(arguments) == samples
