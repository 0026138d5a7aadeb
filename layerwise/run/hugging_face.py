"""What models of Hugging Face have beside layers, on split plans: text, files, and what their configuration says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from layerwise.run import in_full

OF_CONFIGURATION = ("use_cache", "return_dict", "output_attentions", "output_hidden_states")  # unless a call says so


def methods(own: Any) -> dict[str, Callable[..., Any]]:
    """Returns methods that stand in for those of a model's class. Every rank calls them."""

    def save_pretrained(model: Any, *args: Any, **named: Any) -> Any:
        """Has rank 0 write the full model."""
        return in_full.write(model._layerwise._state, lambda: own.save_pretrained(model, *args, **named))

    def generate(model: Any, *args: Any, **named: Any) -> Any:
        """Generates text without a cache of keys and values, as the layers were traced, and with all logits."""
        if model._supports_logits_to_keep():
            named["logits_to_keep"] = 0
        return own.generate(model, *args, **{**named, "use_cache": False})

    stand_ins: dict[str, Callable[..., Any]] = {"save_pretrained": save_pretrained, "generate": generate}
    return {name: method for name, method in stand_ins.items() if hasattr(own, name)}


def as_configured(model: nn.Module, named: Mapping[str, Any], planned: Collection[str]) -> dict[str, Any]:
    """Returns the arguments of a call without those that say what its configuration said when it was traced."""
    config = getattr(model, "config", None)
    known = {name: name != "use_cache" and getattr(config, name) for name in OF_CONFIGURATION if hasattr(config, name)}
    return {name: x for name, x in named.items() if name in planned or name not in known or x is not known[name]}
