"""Operators: each maps a box of its output to the boxes of its inputs and parameters that it needs.

`base` defines what an operator states, `facts` the data types for it; `nn/` and `tensor/` have a file for each family:
shapes, needs, FLOPs, memory, kernel. They know `geometry`, and PyTorch only inside kernels.
"""
