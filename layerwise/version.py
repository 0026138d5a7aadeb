"""The version of layerwise, which files that it writes carry."""

__version__ = "0.3.0"
