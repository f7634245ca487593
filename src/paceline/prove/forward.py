"""A job's forward and a model's own loss, as the definition of a job says: written again, for the oracle."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from paceline.job import Job

_IGNORED = -100


def forward(job: Job, model: nn.Module, data: Any) -> Any:
    """The model's output on one batch."""
    if job.forward is not None:
        return job.forward(model, data)
    if isinstance(data, Tensor):
        return model(data)
    if isinstance(data, Mapping):
        names = inspect.signature(model.forward).parameters
        given = {k: v for k, v in data.items() if k in names}
        if job.loss is not None:
            given.pop("labels", None)
        elif _gives_sum(model):
            given["num_items_in_batch"] = 1
        return model(**given)
    return model(*data[:-1])


def own_loss(model: nn.Module, output: Any, data: Any, num_samples: int) -> Any:
    """The model's own loss with its count."""
    loss = output["loss"] if isinstance(output, Mapping) else output.loss
    if _gives_sum(model) and isinstance(data, Mapping) and "labels" in data:
        shifted = getattr(model, "loss_type", None) == "ForCausalLM"
        labels = data["labels"][..., 1:] if shifted else data["labels"]
        return loss, int((labels != _IGNORED).sum())
    return loss * num_samples, num_samples


def _gives_sum(model: nn.Module) -> bool:
    """Whether the model's own loss is a sum when it is told to divide by one."""
    parameters = inspect.signature(model.forward).parameters
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "num_items_in_batch" in parameters or (is_open and hasattr(model, "loss_function"))
