"""What cannot be imported from PyTorch is one clear line."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.importers.torch.calls import constants as torch_constants
from layerwise.importers.torch.from_torch import from_torch
from tests.importers.zoo import Function


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_control_flow_is_one_clear_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        LayerwiseError, match=r"model 'Branch': .* at torch/test_\w+.py:\d+, 'return x if .*must not depend on data"
    ) as caught:
        from_torch(Branch(), (torch.randn(4),))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    cond = Function(lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)))
    with pytest.raises(LayerwiseError, match=r"control flow .* depends on data"):
        from_torch(cond, (torch.randn(4),))
    with pytest.raises(LayerwiseError, match=r"layer 'item': size \w+ depends on data"):
        from_torch(Function(lambda x: x * x.max().item()), (torch.randn(4),))


def test_wrong_inputs_are_one_clear_line() -> None:
    for inputs, said in (((torch.randn(2, 4, 8, 8),), "expected input"), ((1, 2, 3), "too many")):
        with pytest.raises(LayerwiseError, match=f"{said}.*check that the model runs on these") as caught:
            from_torch(nn.Conv2d(3, 4, 3), inputs)
        assert "\n" not in str(caught.value)
    with pytest.raises(
        LayerwiseError, match="model is 'vgg16'; it must be a Module, a GraphModule or an ExportedProgram"
    ):
        from_torch("vgg16", (torch.randn(2),))  # type: ignore[arg-type]
    for nothing in (nn.Identity(), Function(lambda x: torch.ones(3)), Function(lambda x: None)):
        with pytest.raises(LayerwiseError, match="computes nothing from its inputs"):
            from_torch(nothing, (torch.randn(2, 3),))


def test_unknown_operators_say_what_to_do() -> None:
    drawn = Function(lambda x: torch.normal(x, 1.0))
    with pytest.raises(LayerwiseError, match=r"a tensor as mean .*: write mean \+ std"):
        from_torch(drawn, (torch.randn(4, 5, 8),))
    computed = Function(lambda x, w: F.conv2d(x, w))
    with pytest.raises(LayerwiseError, match="its weight is computed from the samples"):
        from_torch(computed, (torch.randn(4, 3, 8, 8), torch.randn(4, 3, 3, 3)))


class OwnDraws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draws = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(4, generator=self.draws)


def test_a_generator_in_the_forward_pass_is_called_one() -> None:
    with pytest.raises(LayerwiseError, match=r"draws from a torch.Generator, .*: leave generator= out, and seed with"):
        from_torch(OwnDraws(), (torch.randn(2, 4),))


def test_outputs_that_are_not_made() -> None:
    """The mask of a dropout is no part of a layer; nobody may use it."""
    x = torch.randn(4, 3, 8, 8)
    with pytest.raises(LayerwiseError, match=r"an output that layerwise does not compute"):
        from_torch(Function(lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[1] * 1.0), (x,))


def test_many_constants_do_not_take_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be any number of them: here a hundred and fifty of 1 MiB, with room for a hundred."""
    monkeypatch.setattr(torch_constants, "MOST_BYTES", 100 << 20)

    def sums(count: int) -> nn.Module:
        return Function(lambda x: x + sum(torch.arange(2**17) * i for i in range(count)).sum())  # type: ignore[union-attr]

    with pytest.raises(LayerwiseError, match=r"computing the model's constants, up to .* takes more than 100 MiB"):
        from_torch(sums(40), (torch.randn(4),))
    from_torch(sums(3), (torch.randn(4),))
