"""Which device this process may use: what Ray assigned, not what the machine has."""

import torch


def assigned_device(gpu_share: float) -> torch.device:
    """The GPU that Ray gave this actor, with memory held to its share; the CPU when it gave none or there is no CUDA
    (Ray's GPUs may be logical)."""
    import ray

    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if not ids or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", 0)  # Ray makes only the assigned ones visible
    if gpu_share < 1:
        torch.cuda.set_per_process_memory_fraction(gpu_share, device)
    return device
