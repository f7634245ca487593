"""Forward and loss of a job, written for the reference from their definition, without the trainer's code."""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.job import Job, missing_loss_error
from paceline.torch_internals.rng import preserve_rng

_IGNORED = -100  # the label of positions without a target


class ReferenceForward:
    """The forward and loss of one model."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self._job = job
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        self._argument_names = set(parameters)
        # a transformers model passes keyword arguments of its forward on to its loss function
        has_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        passes_divisor_on = has_kwargs and hasattr(model, "loss_function")
        takes_divisor = (
            job.loss is None and job.forward is None and (passes_divisor_on or "num_items_in_batch" in parameters)
        )
        # does the loss become a sum over targets if the divisor `num_items_in_batch` is 1? None: not tested yet
        self._sums_with_divisor: bool | None = None if takes_divisor else False

    def compute_output(self, data: Any) -> Any:
        """Return the model's output on one batch."""
        if self._job.forward is not None:
            return self._job.forward(self._model, data)
        if isinstance(data, torch.Tensor):
            return self._model(data)
        if not isinstance(data, Mapping):
            return self._model(*data[:-1])
        inputs = {k: v for k, v in data.items() if k in self._argument_names}
        if self._job.loss is not None:
            inputs.pop("labels", None)
            return self._model(**inputs)
        if self._sums_with_divisor is None:
            self._sums_with_divisor = self._test_divisor(inputs)
        return self._model(**inputs, **({"num_items_in_batch": 1} if self._sums_with_divisor else {}))

    def model_loss(self, output: Any, data: Any, num_samples: int) -> Any:
        """Return the model's own loss as a sum, and its count: of targets if labels are classes, else of samples.

        Raises:
            JobError: the output has no loss.
        """
        loss, count = _get_loss(output), self._count_targets(data)
        if loss is None:
            raise missing_loss_error(data)
        if count is None:
            return loss * num_samples, num_samples
        if self._sums_with_divisor:
            return loss, count
        return (loss * count, count) if count else (torch.zeros_like(loss) * loss.nan_to_num(0.0), 0)

    def _count_targets(self, data: Any) -> int | None:
        labels = data.get("labels") if isinstance(data, Mapping) else None
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            return None
        loss = getattr(self._model, "loss_function", None)
        if callable(loss) and "shift_labels" in inspect.signature(loss).parameters:
            labels = labels[..., 1:]  # the model compares each position with the next one's label
        return int((labels != _IGNORED).sum())

    def _test_divisor(self, inputs: dict[str, Any]) -> bool | None:
        """Return whether `num_items_in_batch=1` makes the loss a sum; None if the batch has fewer than two targets."""
        count = self._count_targets(inputs)
        if count is None or count < 2:
            return None if count is not None else False
        modes = {module: module.training for module in self._model.modules()}
        with torch.no_grad(), preserve_rng():
            self._model.eval()
            loss_with_divisor = _get_loss(self._model(**inputs, num_items_in_batch=1))
            plain_loss = _get_loss(self._model(**inputs))
        for module, mode in modes.items():
            module.training = mode
        is_precise = loss_with_divisor is not None and loss_with_divisor.dtype in (torch.float32, torch.float64)
        return is_precise and math.isclose(loss_with_divisor.item(), plain_loss.item() * count, rel_tol=1e-4)


def _get_loss(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
