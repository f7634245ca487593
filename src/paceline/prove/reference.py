"""One process, written as naively as it can be: the oracle that every layout is compared with.

Nothing of the feed, the step or the placement is used here; only the order of samples and the keys of the random
streams, which are definitions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, default_collate

from paceline.job import Job
from paceline.order.permute import Permutation
from paceline.streams import key, random_blocks, seed_all, seed_torch

_MASK = 0x7FFF_FFFF_FFFF_FFFF
_BLOCK_STEP = 0x9E37_79B9_7F4A_7C15


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What the reference must know of the run."""

    seed: int
    global_batch_size: int
    micro_batch_size: int
    max_grad_norm: float | None
    drop_last: bool
    autocast: torch.dtype | None
    sample_seeds: str


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """One step's gradient in parts: what each microbatch contributed to it, before the division."""

    contributions: list[dict[str, Tensor]]
    counts: list[float]
    divisor: float
    loss: float
    indices: list[tuple[int, ...]]

    def total(self, *, reverse: bool = False) -> dict[str, Tensor]:
        """The sum over microbatches, divided; in reverse order where the regrouping is wanted."""
        found: dict[str, Tensor] = {}
        for part in reversed(self.contributions) if reverse else self.contributions:
            for name, value in part.items():
                found[name] = found[name] + value if name in found else value.clone()
        return {name: value / self.divisor for name, value in found.items()}


class Reference:
    """The one-process run."""

    def __init__(self, *, job: Job, spec: Spec, cast: Any) -> None:
        self.job = job
        self.spec = spec
        self.cast = cast
        seed_all(key(spec.seed, "build"))
        self.model: nn.Module = job.model()
        self._blocks = random_blocks(self.model)
        self._microbatch = 0
        for number, block in enumerate(self._blocks):
            block.register_forward_pre_hook(self._seeder(number))
        made = job.optimizer([(n, p) for n, p in self.model.named_parameters() if p.requires_grad])
        self.optimizers: list[Optimizer] = list(made) if isinstance(made, list | tuple) else [made]
        self.schedules = [job.lr_schedule(o) for o in self.optimizers] if job.lr_schedule else []
        self._data = _plain(job.train_data)

    @property
    def num_samples(self) -> int | None:
        """Samples in an epoch, where that is known."""
        return len(self._data) if hasattr(self._data, "__len__") and self._is_indexed else None

    def indices(self, *, epoch: int, position: int) -> list[tuple[int, ...]]:
        """The samples of the batch at this position, by microbatch."""
        stop = position + self.spec.global_batch_size
        order = self._order(epoch, stop)[position:stop]
        size = self.spec.micro_batch_size
        return [tuple(order[at : at + size]) for at in range(0, len(order), size)]

    def batches(self, *, epoch: int, position: int) -> list[tuple[tuple[int, ...], Any]]:
        """The same, with their data."""
        return [(part, self.read(epoch=epoch, part=part)) for part in self.indices(epoch=epoch, position=position)]

    def gradient(self, *, step: int, epoch: int, position: int) -> Gradient:
        """Forward and backward of each microbatch, one after another."""
        self.model.train()
        given = self.batches(epoch=epoch, position=position)
        return self.gradient_of(given, step=step)

    def gradient_of(self, given: Sequence[tuple[tuple[int, ...], Any]], *, step: int) -> Gradient:
        """The gradient of given microbatches."""
        known = self._known_counts([data for _, data in given])
        contributions, counts, losses = [], [], []
        for index, (part, data) in enumerate(given):
            self._microbatch = key(self.spec.seed, step, index)
            seed_all(self._microbatch)
            self.model.zero_grad(set_to_none=True)
            terms = self._terms(data, len(part))
            loss = sum(total / known[name] for name, (total, _) in terms.items()) if known else _only(terms)
            loss.backward()  # type: ignore[union-attr]
            contributions.append(
                {n: p.grad.detach().clone() for n, p in self.model.named_parameters() if p.grad is not None}
            )
            counts.append(float(next(iter(terms.values()))[1]))
            losses.append(float(loss.detach()))  # type: ignore[union-attr]
        self.model.zero_grad(set_to_none=True)
        divisor = 1.0 if known else sum(counts)
        return Gradient(
            contributions=contributions,
            counts=counts,
            divisor=divisor,
            loss=sum(losses) / divisor if divisor else float("nan"),
            indices=[part for part, _ in given],
        )

    def update(self, gradient: Mapping[str, Tensor]) -> None:
        """Clip and step with this gradient."""
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradient[name].clone() if name in gradient else None
        if self.spec.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        for schedule in self.schedules:
            schedule.step()

    def _terms(self, data: Any, num_samples: int) -> dict[str, tuple[Tensor, Any]]:
        enabled = self.spec.autocast is not None
        with torch.autocast("cpu", dtype=self.spec.autocast or torch.bfloat16, enabled=enabled):
            output = self._forward(data)
            found = self.job.loss(output, data) if self.job.loss else self._own(output, data, num_samples)
        if isinstance(found, Mapping):
            return dict(found)
        if isinstance(found, tuple):
            return {"loss": found}
        return {"loss": (found * num_samples, num_samples)}

    def _forward(self, data: Any) -> Any:
        if self.job.forward is not None:
            return self.job.forward(self.model, data)
        if isinstance(data, Tensor):
            return self.model(data)
        if isinstance(data, Mapping):
            names = self.model.forward.__code__.co_varnames
            given = {k: v for k, v in data.items() if k in names or _wraps(self.model, k)}
            if self.job.loss is not None:
                given.pop("labels", None)
            elif hasattr(self.model, "loss_function"):
                given["num_items_in_batch"] = 1
            return self.model(**given)
        return self.model(*data[:-1])

    def _own(self, output: Any, data: Any, num_samples: int) -> Any:
        if hasattr(self.model, "loss_function") and isinstance(data, Mapping) and "labels" in data:
            shifted = getattr(self.model, "loss_type", None) == "ForCausalLM"
            labels = data["labels"][..., 1:] if shifted else data["labels"]
            return output.loss, int((labels != -100).sum())
        return output.loss * num_samples, num_samples

    def _known_counts(self, data: Sequence[Any]) -> dict[str, float] | None:
        if self.job.count is None:
            return None
        totals: dict[str, float] = {}
        for batch in data:
            found = self.job.count(batch)
            for name, value in (found if isinstance(found, Mapping) else {"loss": found}).items():
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def _order(self, epoch: int, stop: int) -> list[int]:
        order = self.job.order
        if not self._is_indexed:
            return list(range(sum(1 for _ in islice(iter(self._data), stop))))
        total = len(self._data)
        if order == "sequential":
            return list(range(total))
        if order is None:
            whole = Permutation(num_samples=total, seed=self.spec.seed, epoch=epoch)
            return [int(i) for i in whole[0 : min(stop, total)]]
        seed_all(key(self.spec.seed, "order", epoch))
        if callable(order):
            return list(order(total, epoch, self.spec.seed))
        if hasattr(order, "set_epoch"):
            order.set_epoch(epoch)
        return list(order)

    def read(self, *, epoch: int, part: Sequence[int]) -> Any:
        """These samples, collated."""
        if not self._is_indexed:
            rows = list(islice(iter(self._data), max(part) + 1))
            return self._collated([rows[i] for i in part])
        rows = []
        if self.spec.sample_seeds == "never":
            seed_all(key(self.spec.seed, "microbatch", epoch, part[0]))
        for index in part:
            if self.spec.sample_seeds != "never":
                seed_all(key(self.spec.seed, "sample", epoch, index))
            rows.append(self._data[index])
        return self._collated(rows)

    def _collated(self, rows: list[Any]) -> Any:
        return self.cast((self.job.collate or default_collate)(rows))

    def _seeder(self, block: int) -> Any:
        def hook(module: nn.Module, _: object) -> None:
            if module.training:
                seed_torch((self._microbatch ^ (_BLOCK_STEP * (block + 1))) & _MASK)

        return hook

    @property
    def _is_indexed(self) -> bool:
        return hasattr(self._data, "__getitem__") and hasattr(self._data, "__len__")


def _only(terms: Mapping[str, tuple[Tensor, Any]]) -> Tensor:
    (total, _), *rest = terms.values()
    if rest:
        raise ValueError("several terms without counts")
    return total


def _plain(data: Any) -> Any:
    if callable(data) and not hasattr(data, "__getitem__") and not isinstance(data, Iterable):
        data = data()
    return data.dataset if isinstance(data, DataLoader) else data


def _wraps(model: nn.Module, name: str) -> bool:
    """A decorated forward hides its names behind `*args`; its signature still tells them."""
    wrapped = getattr(model.forward, "__wrapped__", None)
    return wrapped is not None and name in wrapped.__code__.co_varnames
