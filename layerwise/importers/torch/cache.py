"""Caches: language models of Hugging Face return the keys and values of their attention, for the generation of text.

Their configuration says so (`config.use_cache`), and training has no use for it. What they compute does not change.
https://huggingface.co/docs/transformers/main_classes/configuration
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """With `use_cache` off in the configurations of the model and of the modules inside; afterwards as before."""
    called = [held for held in vars(model).values() if isinstance(held, nn.Module)]  # beside its children: a wrapper's
    configurations = {id(c): c for module in (*model.modules(), *called) if (c := getattr(module, "config", None))}
    caching = [c for c in configurations.values() if getattr(c, "use_cache", None) is True]
    try:
        for configuration in caching:
            configuration.use_cache = False
        yield
    finally:
        for configuration in caching:
            configuration.use_cache = True
