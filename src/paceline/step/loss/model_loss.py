"""The loss that a model computes itself, as Hugging Face models do: a sum if the model supports it, else a mean.

Many forwards accept `num_items_in_batch` but ignore it, or divide only a part of the loss by it. So the model is
tested: its loss with `num_items_in_batch=1` must equal its default loss times the number of targets in the batch.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.job import missing_loss_error
from paceline.parallel.context_parallel.context_parallel import loss_shifts_labels
from paceline.torch_internals.rng import preserve_rng

IGNORED_LABEL = -100
DIVISOR = "num_items_in_batch"
_MAX_TRIES = 3
_TOLERANCE = 1e-4


class ModelLoss:
    """A model's loss, in `output.loss`. The first batch with several targets shows whether it is a sum or a mean."""

    def __init__(self, model: nn.Module, *, takes_divisor: bool) -> None:
        self._model = model
        self._shifts_labels = loss_shifts_labels(model)
        self._tries_left = _MAX_TRIES if takes_divisor else 0
        self._is_sum = False

    def forward_arguments(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the forward's arguments, with `num_items_in_batch=1` if that makes the model's loss a sum."""
        self.probe_if_untested(batch)
        return {**batch, DIVISOR: 1} if self._is_sum else dict(batch)

    def probe_if_untested(self, batch: Mapping[str, Any]) -> None:
        """Test on this batch whether the model's loss is a sum. Do nothing if that is known or was tried too often."""
        if self._tries_left and not self._is_sum:
            self._probe(batch)

    def stop_probing(self, *, are_labels_shifted: bool = False) -> None:
        """Test no further batch. If `are_labels_shifted`, labels are shifted before the forward from now on."""
        self._tries_left = 0
        self._shifts_labels = self._shifts_labels and not are_labels_shifted

    def term(self, output: Any, batch: Any, *, num_samples: int) -> tuple[Tensor, Tensor | float]:
        """Return the loss sum and its count.

        Raises:
            JobError: the output has no loss.
        """
        loss = _loss_of(output)
        if loss is None:
            raise missing_loss_error(batch)
        loss = loss.reshape(())
        count = self._count_targets(batch)
        if count is None:
            return loss * num_samples, float(num_samples)
        if self._is_sum:
            return loss, count
        return torch.where(count > 0, loss, loss.nan_to_num(nan=0.0)) * count, count  # a mean over nothing is NaN

    def _count_targets(self, batch: Any) -> Tensor | None:
        """Return the number of labels that are not ignored, or None if labels are not class indices."""
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return None
        return ((labels[..., 1:] if self._shifts_labels else labels) != IGNORED_LABEL).sum()

    def _probe(self, batch: Mapping[str, Any]) -> None:
        """Compare two trial calls on this batch, with `num_items_in_batch=1` and without it, and set `_is_sum`."""
        self._tries_left -= 1
        count = self._count_targets(batch)
        if count is None or int(count) < 2:
            return
        with _eval_context(self._model):
            with_divisor, default = (_loss_of(self._model(**batch, **extra)) for extra in ({DIVISOR: 1}, {}))
        if with_divisor is None or default is None or with_divisor.dtype not in (torch.float32, torch.float64):
            return
        self._is_sum = math.isclose(float(with_divisor), float(default) * int(count), rel_tol=_TOLERANCE)
        self._tries_left = 0


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


@contextmanager
def _eval_context(model: nn.Module) -> Iterator[None]:
    """Return a context in which the model is in eval mode, without gradients.

    The exit restores the training modes and the random generators.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), preserve_rng():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
