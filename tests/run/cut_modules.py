"""Modules for checkpoints to save: tensors cut at random, held by ranks at random, and nothing that computes."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.geometry import Box
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model
from layerwise.run.state.state import Shard

GRAPH = load_model("mlp:4x3x2", 8)
Cutting = dict[str, tuple[Box | None, ...]]  # for every tensor the box of each rank


def tiling(shape: tuple[int, ...], most: int, chance: random.Random) -> list[Box]:
    """At most `most` boxes that tile a tensor: cut somewhere, then each part again."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(chance.randrange(most)):
        box = boxes.pop(chance.randrange(len(boxes)))
        dims = [dim for dim, extent in enumerate(box.shape) if extent > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = chance.choice(dims)
        at = chance.randrange(box.lo[dim] + 1, box.hi[dim])
        boxes += [
            Box(box.lo, (*box.hi[:dim], at, *box.hi[dim + 1 :])),
            Box((*box.lo[:dim], at, *box.lo[dim + 1 :]), box.hi),
        ]
    return boxes


def cutting(whole: Mapping[str, Tensor], ranks: int, seed: int) -> Cutting:
    """Every tensor cut into at most as many boxes as there are ranks; the other ranks hold one of these, or nothing."""
    chance = random.Random(seed)
    result: Cutting = {}
    for name, tensor in whole.items():
        boxes: list[Box | None] = list(tiling(tuple(tensor.shape), ranks, chance))
        boxes += [chance.choice([None, *boxes]) for _ in range(ranks - len(boxes))]
        chance.shuffle(boxes)
        result[name] = tuple(boxes)
    return result


@dataclass
class CutModule:
    """One rank's part of `whole`. Tensors of floating point are parameters, the others buffers."""

    comm: Comm
    whole: Mapping[str, Tensor]
    cut: Cutting
    steps_done: int = 0
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layer_graph: LayerGraph = GRAPH
    held: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._layerwise = self  # as `layerwise.of` looks for it
        self.held = {}
        for name, boxes in self.cut.items():
            box = boxes[self.comm.rank]
            if box is not None:
                part = self.whole[name][box.slices()].clone()
                self.held[name] = nn.Parameter(part) if part.is_floating_point() else part

    def shards(self) -> list[Shard]:
        result = []
        for name, tensor in self.held.items():
            boxes, trained = self.cut[name], isinstance(tensor, nn.Parameter)
            box = boxes[self.comm.rank]
            assert box is not None
            first = boxes.index(box) == self.comm.rank
            aliases, shape = self.aliases.get(name, ()), tuple(self.whole[name].shape)
            result.append(Shard(name, aliases, shape, box, tensor.detach(), trained, first))
        return result

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        if not any(isinstance(tensor, nn.Parameter) for tensor in self.held.values()):
            yield "idle", nn.Parameter(torch.zeros(0))  # an optimizer refuses an empty list
        for name, tensor in self.held.items():
            if isinstance(tensor, nn.Parameter):
                yield name, tensor

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    def set_gradients(self, whole: Mapping[str, Tensor]) -> None:
        """Each parameter's gradient: its box of this; none where there is none."""
        for name, parameter in self.named_parameters():
            if name in whole:
                box = self.cut[name][self.comm.rank]
                assert box is not None
                parameter.grad = whole[name][box.slices()].clone()


def assembled(modules: Sequence[CutModule]) -> dict[str, Tensor]:
    """The whole tensors that these ranks hold together; equal boxes must be equal."""
    result: dict[str, Tensor] = {}
    for name, tensor in modules[0].whole.items():
        result[name], known = torch.zeros_like(tensor), torch.zeros(tensor.shape, dtype=torch.bool)
        for module in modules:
            box = module.cut[name][module.comm.rank]
            if box is not None:
                part, seen = module.held[name].detach(), known[box.slices()]
                assert torch.equal(part[seen], result[name][box.slices()][seen])
                result[name][box.slices()] = part
                known[box.slices()] = True
        assert known.all(), name
    return result


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights of several dimensions, and buffers; among them a scalar, an empty one and an odd name."""
    chance = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance, dtype=torch.float64).to(dtype)

    return {
        "conv.weight": drawn(5, 3, 2, 3),
        "conv.bias": drawn(5),
        "/fc/weight@0,1": drawn(7, 4),
        "scale": drawn(),
        "nothing": drawn(0, 4),
        "count": torch.randint(0, 99, (), generator=chance),
        "mask": torch.randint(0, 2, (3, 5), generator=chance).bool(),
        "table": torch.randint(0, 99, (6,), generator=chance, dtype=torch.int32),
    }
