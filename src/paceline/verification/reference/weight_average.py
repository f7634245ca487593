"""The moving average of a job's weights (`ema=`) for the reference, computed one tensor at a time."""

import torch
from torch import Tensor, nn


class WeightAverage:
    """The average of every floating-point parameter; empty if the job has no `ema=`."""

    def __init__(self, model: nn.Module, *, decay: float | None) -> None:
        self._decay = 0.0 if decay is None else decay
        named = [] if decay is None else list(model.named_parameters())
        self.tensors: dict[str, Tensor] = {n: p.detach().clone() for n, p in named if p.is_floating_point()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Update the average after an optimizer step."""
        weights = dict(model.named_parameters())
        for name, average in self.tensors.items():
            self.tensors[name] = average.lerp(weights[name].detach(), 1.0 - self._decay)
