"""python -m layerwise.importers: writes the graphs of the built-in networks (`models/graphs`) from their models."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from layerwise.files import write_text
from layerwise.graph import graph_json
from layerwise.importers.built_in import SAMPLES
from layerwise.importers.load import load_network
from layerwise.models import names


def main() -> None:
    """Writes the graphs of all built-in networks."""
    folder = Path(str(resources.files("layerwise.models") / "graphs"))
    folder.mkdir(exist_ok=True)
    for name in names():
        write_text(folder / f"{name}.json", graph_json.write(load_network(name, SAMPLES).graph))


if __name__ == "__main__":
    main()
