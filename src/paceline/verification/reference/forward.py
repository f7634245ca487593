"""Forward and loss of a job, written a second time from their definition for the reference."""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.job import Job, no_loss
from paceline.torch_internals.rng import preserve_rng

_IGNORED = -100


class Forward:
    """The forward and loss of one model. `_divisor` tells whether its loss is a sum when told to divide by one."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self._job = job
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        self._names = set(parameters)
        is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and hasattr(model, "loss_function")
        asks = job.loss is None and job.forward is None and (is_open or "num_items_in_batch" in parameters)
        self._divisor: bool | None = None if asks else False

    def output(self, data: Any) -> Any:
        """Return the model's output on one batch."""
        if self._job.forward is not None:
            return self._job.forward(self._model, data)
        if isinstance(data, torch.Tensor):
            return self._model(data)
        if not isinstance(data, Mapping):
            return self._model(*data[:-1])
        given = {k: v for k, v in data.items() if k in self._names}
        if self._job.loss is not None:
            given.pop("labels", None)
            return self._model(**given)
        if self._divisor is None:
            self._divisor = self._find_out(given)
        return self._model(**given, **({"num_items_in_batch": 1} if self._divisor else {}))

    def own_loss(self, output: Any, data: Any, num_samples: int) -> Any:
        """Return the model's own loss with its count: of targets if labels are classes, else of samples.

        Raises:
            JobError: the output has no loss.
        """
        loss, count = _loss_in(output), self._count(data)
        if loss is None:
            raise no_loss(data)
        if count is None:
            return loss * num_samples, num_samples
        if self._divisor:
            return loss, count
        return (loss * count, count) if count else (torch.zeros_like(loss) * loss.nan_to_num(0.0), 0)

    def _count(self, data: Any) -> int | None:
        labels = data.get("labels") if isinstance(data, Mapping) else None
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            return None
        loss = getattr(self._model, "loss_function", None)
        if callable(loss) and "shift_labels" in inspect.signature(loss).parameters:
            labels = labels[..., 1:]  # the model compares each position with the next one's label
        return int((labels != _IGNORED).sum())

    def _find_out(self, given: dict[str, Any]) -> bool | None:
        """Return whether the model's loss is a sum if told to divide by one; None if the batch has too few targets."""
        count = self._count(given)
        if count is None or count < 2:
            return None if count is not None else False
        modes = {module: module.training for module in self._model.modules()}
        with torch.no_grad(), preserve_rng():
            self._model.eval()
            by_one = _loss_in(self._model(**given, num_items_in_batch=1))
            by_itself = _loss_in(self._model(**given))
        for module, mode in modes.items():
            module.training = mode
        exact_enough = by_one is not None and by_one.dtype in (torch.float32, torch.float64)
        return exact_enough and math.isclose(by_one.item(), by_itself.item() * count, rel_tol=1e-4)


def _loss_in(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
