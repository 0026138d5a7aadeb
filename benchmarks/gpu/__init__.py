"""All that one GPU can prove, in one command: `python -m benchmarks.gpu --out DIR` (docs/benchmarks/gpu.md)."""
