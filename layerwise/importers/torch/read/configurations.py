"""Configurations of Hugging Face's models: switches that are set otherwise while a model is traced.

- `use_cache`: language models return the keys and values of their attention, for the generation of text, and training
  has no use for them.
- Experts (a mixture of) sort all tokens of all samples by their expert, and take each expert's part. How many those are
  depends on data, and samples are mixed. "batched_mm" is the same product token by token, with the weights of each
  token's experts side by side.

What the models compute does not change. https://huggingface.co/docs/transformers/main_classes/configuration and
https://huggingface.co/docs/transformers/experts_interface
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from torch import nn

# An attribute of a configuration, the values that are changed, and the value that stands instead.
SWITCHES: tuple[tuple[str, tuple[object, ...], object], ...] = (
    ("use_cache", (True,), False),
    ("_experts_implementation_internal", ("grouped_mm", "eager"), "batched_mm"),
)


@contextmanager
def configured(model: nn.Module) -> Iterator[None]:
    """With the switches of the model and of the modules inside set for a trace; afterwards as before."""
    configurations = {id(c): c for module in model.modules() if (c := getattr(module, "config", None))}
    with ExitStack() as stack:
        for configuration in configurations.values():
            for name, changed, value in SWITCHES:
                if getattr(configuration, name, None) in changed:
                    stack.enter_context(mock.patch.object(configuration, name, value))
        yield
