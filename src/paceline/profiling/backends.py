"""The `torch.distributed` backends that this build of torch has."""

import torch.distributed as dist


def available_backends() -> tuple[str, ...]:
    """Return the backends that this build of torch has."""
    checks = {
        "nccl": dist.is_nccl_available,
        "gloo": dist.is_gloo_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
    }
    return tuple(name for name, is_available in checks.items() if is_available())
