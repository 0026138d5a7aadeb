"""What Hugging Face's models have beside layers, on split plans: generation, files and their configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from layerwise.run import in_full

OF_CONFIGURATION = ("use_cache", "return_dict", "output_attentions", "output_hidden_states")  # unless a call says so


def methods(own: Any) -> dict[str, Callable[..., Any]]:
    """Returns methods that replace those of a model's class. Every rank must call them."""

    def save_pretrained(model: Any, *args: Any, **named: Any) -> Any:
        """Makes rank 0 write the full model."""
        return in_full.write(model._layerwise._state, lambda: own.save_pretrained(model, *args, **named))

    def generate(model: Any, *args: Any, **named: Any) -> Any:
        """Generates text without a key-value cache, as the layers were traced, and with all logits."""
        if model._supports_logits_to_keep():
            named["logits_to_keep"] = 0
        return own.generate(model, *args, **{**named, "use_cache": False})

    stand_ins: dict[str, Callable[..., Any]] = {"save_pretrained": save_pretrained, "generate": generate}
    return {name: method for name, method in stand_ins.items() if hasattr(own, name)}


def as_configured(model: nn.Module, named: Mapping[str, Any], planned: Collection[str]) -> dict[str, Any]:
    """Returns a call's arguments without those that repeat what the configuration said when the model was traced."""
    config = getattr(model, "config", None)
    known = {name: name != "use_cache" and getattr(config, name) for name in OF_CONFIGURATION if hasattr(config, name)}
    return {name: x for name, x in named.items() if name in planned or name not in known or x is not known[name]}
