"""Layers and their graph: a network, in whatever form it was handed in.

`layer` and `layer_graph` are the two types, `builder` creates them, `fuse` fuses, `digest` identifies a graph for
plans. It knows `ops`, and nothing of PyTorch's or ONNX's programs.
"""
