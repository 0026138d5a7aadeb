"""Layers and their graph: what a network is, however it was handed in.

`layer` and `layer_graph` are the two types, `builder` makes them, `fuse` fuses, `digest` is what a plan knows a graph
by. It knows `ops`, and nothing of PyTorch's or ONNX's programs.
"""
