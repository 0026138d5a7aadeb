"""python -m benchmarks.zoo.fresh: which networks the rule of networks/of_fresh.py takes, of the installed packages."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.zoo import networks
from benchmarks.zoo.example import shallow
from benchmarks.zoo.networks.of_fresh import transformers_network

COUNT, MOST = 50, 30e6


def _tables() -> str:
    """The text of all other tables."""
    folder = Path(networks.__file__).parent
    return "\n".join(path.read_text() for path in sorted(folder.glob("of_*.py")) if path.stem != "of_fresh")


def of_timm() -> Iterator[str]:
    """The smallest variant of each module that no table has a network of."""
    import timm
    from timm.models._registry import _model_to_module

    modules = defaultdict(list)
    for name in timm.list_models():
        modules[_model_to_module[name]].append(name)
    named = set(re.findall(r'"([a-z0-9_]+)"', _tables()))
    for variants in (modules[module] for module in sorted(modules)):
        if not named & set(variants):
            sizes = {}
            for name in variants:
                with torch.device("meta"):
                    sizes[name] = sum(p.numel() for p in timm.create_model(name).parameters())
            smallest = min(sizes, key=lambda name: (sizes[name], name))
            with torch.device("meta"):
                left = shallow(timm.create_model(smallest))
            if sum(p.numel() for p in left.parameters()) <= MOST:
                yield smallest


def of_transformers(count: int) -> Iterator[str]:
    """The first that PyTorch runs of each of `count` stretches of the families that no table has."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    tables = _tables()
    known = set(re.findall(r'"([A-Za-z0-9]+)"', tables))  # of configurations, without "Config"
    families = []
    for family in sorted(MODEL_MAPPING_NAMES):
        try:
            config = CONFIG_MAPPING[family].__name__
        except (KeyError, ImportError):
            continue
        if config.removesuffix("Config") not in known:
            families.append(family)
    taken: set[str] = set()
    for i in range(count):
        for family in families[i * len(families) // count : (i + 1) * len(families) // count]:
            try:
                torch.manual_seed(0)
                example = transformers_network(family)
            except Exception:  # whatever it lacks: PyTorch does not run it so
                continue
            kind = type(example.model).__name__
            if kind not in taken and sum(p.numel() for p in example.model.parameters()) <= MOST:
                taken.add(kind)
                yield family
                break


if __name__ == "__main__":
    of_both = 0
    for name in of_timm():
        print("timm", name, flush=True)
        of_both += 1
    for name in of_transformers(COUNT - of_both):
        print("transformers", name, flush=True)
