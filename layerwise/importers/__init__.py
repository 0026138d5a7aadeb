"""Importers: turn a module, an exported program or an ONNX file into a graph, with the places of its values.

`load` is the entry point; `torch/` traces and proves, `onnx/` walks a file; in both, `ops/` has a row for each
operator; `registry` accepts operators of the user's. They know `graph` and `ops`, and nothing of cost or plans.
"""
