"""Built-in machine profiles, one JSON file each (installed as `layerwise.profiles`); README.md describes them."""
