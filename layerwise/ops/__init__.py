"""Operators: each maps a box of its output to the boxes of its inputs and parameters that it needs.

`base` has what an operator states, `facts` what follows; `nn/` and `tensor/` have a file a family: shapes, needs,
FLOPs, memory, kernel. They know `geometry`, and PyTorch inside of kernels alone.
"""
