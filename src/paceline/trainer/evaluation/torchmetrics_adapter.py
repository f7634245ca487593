"""Metric objects (torchmetrics). Each rank updates its objects with its data; at the end, the states are gathered."""

import base64
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.errors import JobError


class TorchMetricsAdapter:
    """The job's metrics that have `update`, `compute` and `reset`."""

    def __init__(self, metrics: Mapping[str, Any] | None, *, world: World) -> None:
        self._world = world
        self._metrics = {name: metric for name, metric in (metrics or {}).items() if hasattr(metric, "compute")}
        for metric in self._metrics.values():
            if isinstance(metric, torch.nn.Module):
                metric.to(world.device)
            for member in _synchronised_metrics(metric):
                member.dist_sync_fn = self._gather

    def __contains__(self, name: str) -> bool:
        return name in self._metrics

    def update(self, name: str, output: Any, batch: Any) -> None:
        """Update a metric with one microbatch."""
        self._metrics[name].update(output, _metric_target(batch))

    def compute(self) -> dict[str, float]:
        """Return the values over all ranks' samples, and reset. Each number that a metric returns has its own name."""
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a rank may have no samples
                values |= dict(_named_numbers(name, metric.compute()))
        self.reset()
        return values

    def reset(self) -> None:
        """Reset all metrics."""
        for metric in self._metrics.values():
            metric.reset()

    def _gather(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """Return every rank's state, of any length, without the empty states of ranks that have no samples."""
        flat = state.detach().cpu().contiguous()
        raw = bytes(flat.reshape(-1).view(torch.uint8).numpy()) if flat.numel() else b""
        local_state = [str(flat.dtype).removeprefix("torch."), list(flat.shape), base64.b64encode(raw).decode()]
        states = [_decode_tensor(*encoded).to(state.device) for encoded in self._world.gather_json(local_state)]
        return [rank_state for rank_state in states if rank_state.numel()] or states[:1]


def _synchronised_metrics(metric: Any) -> Iterator[Any]:
    """Yield every metric that gathers its own state: the metric itself, and those in a wrapper or a collection."""
    candidates = metric.modules() if isinstance(metric, torch.nn.Module) else [metric]
    yield from (candidate for candidate in candidates if hasattr(candidate, "dist_sync_fn"))


def _decode_tensor(dtype: str, shape: list[int], text: str) -> Tensor:
    raw = base64.b64decode(text)
    kind = getattr(torch, dtype)
    if not raw:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(kind).reshape(shape)


def _named_numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield each number in a computed metric, with a name that starts with `name`."""
    if isinstance(value, Mapping):
        for key, inner_value in value.items():
            yield from _named_numbers(f"{name}/{key}", inner_value)
        return
    if isinstance(value, Tensor) and value.numel() != 1:
        if value.dim() != 1:
            raise JobError(
                f"the metric {name!r} computed a tensor of shape {list(value.shape)}, expected numbers.",
                hint="log it from on_eval",
            )
        yield from ((f"{name}/{index}", float(number)) for index, number in enumerate(value))
        return
    yield name, float(value)


def _metric_target(batch: Any) -> Any:
    """Return the part of a batch that a metric gets as its target: the labels, or the last entry of a tuple."""
    if isinstance(batch, Mapping):
        return batch.get("labels", batch)
    return batch[-1] if isinstance(batch, tuple | list) else batch
