"""Importers: a module, an exported program or an ONNX file becomes a graph, with where its values lie.

`load` is the door; `torch/` traces and proves, `onnx/` walks a file; in both `ops/` has a row an operator; `registry`
takes operators of the user's. They know `graph` and `ops`, and nothing of cost or plans.
"""
