"""What this process may use: the device that Ray assigned, not what the machine has; and memory."""

import ctypes
import importlib.abc
import sys
from typing import Any

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def assigned_device(gpu_share: float) -> torch.device:
    """The GPU that Ray gave this actor, with memory held to its share; the CPU when it gave none or
    there is no CUDA (Ray's GPUs may be logical)."""
    import ray

    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if not ids or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", 0)  # Ray makes only the assigned ones visible
    if gpu_share < 1:
        torch.cuda.set_per_process_memory_fraction(gpu_share, device)
    return device


def arrow_without_pandas() -> None:
    """Keep pyarrow from importing pandas, which it does at the first array it makes if pandas is
    installed: 60 MiB. `to_pandas` still finds it later."""
    import pyarrow as pa

    class NoPandas(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: Any = None) -> None:
            if name == "pandas":
                raise ImportError("not needed here")

    refuse = NoPandas()
    sys.meta_path.insert(0, refuse)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(refuse)


def keep_freed_memory(bytes: int = 2**26) -> None:
    """Tell glibc to keep what a training step frees, since the next step takes the same megabytes
    again. Handing them back and forth to the system costs cnn1 a quarter of its speed."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, bytes)
        libc.mallopt(_M_TRIM_THRESHOLD, bytes)
