"""The graphs of the built-in networks, written down in `models/graphs`, so that planning for one imports no torch.

`python -m layerwise.importers` writes them again, of their models: after a change of a model, an importer or an
operator. A test compares each with its model.
"""

from __future__ import annotations

from importlib import resources

from layerwise.graph import graph_json
from layerwise.graph.layer import LayerGraph
from layerwise.models import names

SAMPLES = 2  # of a graph that is written down, and of the example that a built-in network is traced with


def written_graph(name: str) -> LayerGraph | None:
    """The unfused graph of a built-in network, of SAMPLES samples; None where none is written down."""
    if name not in names():  # those of any size, as mlp:8x8
        return None
    where = f"graphs/{name}.json"
    return graph_json.read((resources.files("layerwise.models") / where).read_text(encoding="utf-8"), where)
