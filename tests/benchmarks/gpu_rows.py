"""Rows for test_gpu.py, which a process of their own takes."""

import os
import time

from benchmarks.gpu.rows import Found, Row, Setting


def rows(setting: Setting) -> list[Row]:
    """One raises, one takes its process with it, one hangs, and one is well."""
    return [Row("raises", raises), Row("ends", lambda: os._exit(3)), Row("hangs", hangs, 3.0), Row("is well", well)]


def raises() -> Found:
    raise RuntimeError("CUDA error: an illegal memory access\nCompile with TORCH_USE_CUDA_DSA")


def hangs() -> Found:
    time.sleep(1000)
    return well()


def well() -> Found:
    return {"told": "fine", "pid": os.getpid()}
