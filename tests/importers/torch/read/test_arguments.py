"""Models that are called by names: on one device, and by two ranks."""

import pytest
import torch

import layerwise
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from tests.api.ranks import by_names, named, words
from tests.api.test_parallelize import apart
from tests.comm.pool import run_ranks


def test_the_numbers_are_those_of_the_model() -> None:
    model = named()
    model(**words())["loss"].backward()
    loss = model(**words())["loss"].item()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    alone, state = by_names(SoloComm(), {})
    assert alone == pytest.approx(loss, rel=1e-12)
    assert apart(state, model.state_dict()) <= 1e-12
    ranks = run_ranks(2, "tests.api.ranks:by_names", {"strategy": {"body.0": {"c": 2}}})
    assert sum(rank[0] for rank in ranks) / 2 == pytest.approx(loss, rel=1e-9)
    for _, whole in ranks:
        assert apart(whole, model.state_dict()) <= 1e-9


class Drawing(torch.nn.Module):
    """Draws without a module of PyTorch's, so it is run layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.named = named()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.named(input_ids, labels)
        return {**made, "logits": torch.nn.functional.dropout(made["logits"], 1e-9)}


class Optional(Drawing):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        return torch.nn.functional.dropout(x + self.named.body[0].bias.sum() + (0 if y is None else y), 1e-9)


def test_the_names_must_be_those_that_were_traced() -> None:
    """Where it is run layer by layer; the model itself is called as it is."""
    labels, ids = words().values()
    native, itself = named(), layerwise.parallelize(named(), words())
    assert itself(ids, labels)["loss"].item() == native(input_ids=ids, labels=labels)["loss"].item()
    assert torch.equal(itself(input_ids=ids)["logits"], native(ids)["logits"])
    model = layerwise.parallelize(Drawing(), words()).eval()
    assert model(ids, labels)["loss"].item() == model(input_ids=ids, labels=labels)["loss"].item()
    with pytest.raises(LayerwiseError, match="missing a required argument: 'labels'"):
        model(input_ids=ids)
    with pytest.raises(LayerwiseError, match="got an unexpected keyword argument 'mask'"):
        model(input_ids=ids, labels=labels, mask=ids)
    with pytest.raises(LayerwiseError, match=r"call it with names, model\(\*\*batch\)"):
        layerwise.parallelize(Optional(), {"x": ids, "y": ids}).eval()({"x": ids, "y": ids})
    with pytest.raises(LayerwiseError, match="named x, but Drawing takes"):
        layerwise.parallelize(Drawing(), {"x": ids})
