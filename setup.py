"""Finds the packages, of which models/ and profiles/ stay at the top of the repository; pyproject.toml has the rest."""

from setuptools import find_namespace_packages, setup

found = find_namespace_packages(include=["layerwise*", "models*", "profiles*"], exclude=["*__pycache__"])
setup(packages=[name if name.startswith("layerwise") else f"layerwise.{name}" for name in found])
