"""Values that the device is still computing, read without stopping it."""

import torch
from torch import Tensor


class Later:
    """Numbers copied off the device in the background; `values` waits only for that copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tensor.detach()

    def values(self) -> list[float]:
        """The numbers, as a flat list."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        values: list[float] = self._host.reshape(-1).tolist()
        return values
