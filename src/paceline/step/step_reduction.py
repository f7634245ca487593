"""The values that all ranks agree on in a step: one small vector, all-reduced once while backward runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.data.stream.rank_mismatch import NOT_SEEDED, SEED_IT
from paceline.errors import DesyncError, JobError
from paceline.step.local_sgd.message_batching import MessageBatcher
from paceline.step.loss.loss_return_value import Terms, refuse_count

STOP, BUFFERS, MISMATCH, FINGERPRINT = range(4)
_NUM_FLAGS = 4
_FINGERPRINT_RANGE = 1 << 24
_COUNTS = 1e-5  # tolerance for counts that sum fp32 weights in another order


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """The reduced values of one step, the same on every rank."""

    loss: float
    terms: dict[str, float]
    counts: dict[str, float]
    divided_by: dict[str, float]
    stop: bool
    buffers_changed: bool
    broken: tuple[tuple[int, str], ...] = ()
    """The microbatches and terms whose sum is not finite."""

    def check_counts(self) -> None:
        """Check the counts that the loss was divided by: a wrong count means a wrong gradient.

        Raises:
            JobError: `count=` and the loss count different things.
        """
        for name, given in self.divided_by.items():
            found = self.counts.get(name, 0.0)
            if not math.isclose(given, found, rel_tol=_COUNTS, abs_tol=_COUNTS):
                raise JobError(
                    f"count= gives {given:g} for the term {name} over the global batch, but the "
                    f"loss returns {found:g}.",
                    cause="they count different things: samples or tokens, all targets or unmasked ones",
                    hint="count=lambda batch: the same number as the loss returns with its sum",
                )


class StepReduction:
    """The reduction vector of one step: flags, then a slot with `(sum, count)` for each term of each microbatch.

    Each slot is filled by exactly one rank, so the sum over ranks adds only zeros and its order changes no bit.
    """

    def __init__(self, *, world: World, names: Sequence[str], num_micro: int, on_empty: str = "stop") -> None:
        self._world = world
        self._ranks = world.world_size
        self.names = tuple(names)
        self._num_micro = num_micro
        self._on_empty = on_empty
        self._flags = [0.0] * _NUM_FLAGS
        self._slots: dict[int, Terms] = {}
        self._vector: Tensor | None = None
        self._wait: Callable[[], object] | None = None
        self._agreed: StepTotals | None = None
        self._expected: Mapping[str, Tensor] = {}

    def expect(self, counts: Mapping[str, Tensor]) -> None:
        """Store the global counts that the loss is divided by, if known in advance; the terms must give the same."""
        self._expected = counts

    def flag(self, number: int, value: float = 1.0) -> None:
        """Set a flag, or store the batch's fingerprint."""
        self._flags[number] = value % _FINGERPRINT_RANGE

    def put(self, microbatch: int, terms: Terms) -> None:
        """Store the terms of one microbatch."""
        if tuple(terms) != self.names:
            self._flags[MISMATCH] = 1.0
        self._slots[microbatch] = {name: (total.detach(), count) for name, (total, count) in terms.items()}

    def start(self) -> None:
        """Start the all-reduce; ranks without a microbatch call this too."""
        self._vector = self._packed()
        self._wait = self._world.start_all_reduce(self._vector)

    def across(self, bundle: MessageBatcher) -> "StepReduction":
        """Return this reduction summed over all sites of local SGD.

        Expected counts are not carried over: each site divides by its own, and has checked them already.
        """
        wide = StepReduction(world=self._world, names=self.names, num_micro=self._num_micro, on_empty=self._on_empty)
        wide._flags, wide._ranks = self._flags, self._ranks * bundle.peers.world_size
        wide._vector = self._arrived().clone()
        wide._wait = bundle.add(wide._vector)
        return wide

    def own_count(self) -> float:
        """Return the total count over all terms that this rank has put in."""
        return math.fsum(float(count) for terms in self._slots.values() for _, count in terms.values())

    def own_loss(self) -> float:
        """Return the loss of the terms that this rank has put in, each divided by its own count."""
        sums = {name: [0.0, 0.0] for name in self.names}
        for terms in self._slots.values():
            for name, (total, count) in terms.items():
                sums[name] = [sums[name][0] + float(total), sums[name][1] + float(count)]
        return sum(_quotient(total, count) for total, count in sums.values() if total or count)

    def divisor(self) -> float | Tensor:
        """Return the global count of the only term; zero gives NaN gradients, which the finite check reports.

        If `on_empty` is "zero", a zero count is replaced by one: the term's sums are zero as well.
        """
        vector = self._arrived()
        counts = vector[_NUM_FLAGS + 1 :: 2]
        if vector.device.type == "cpu":
            total = math.fsum(counts.tolist())
            return total or 1.0 if self._on_empty == "zero" else total
        found = counts.sum()
        return torch.where(found == 0, torch.ones_like(found), found) if self._on_empty == "zero" else found

    def agreed(self) -> StepTotals:
        """Return the reduced values; on a GPU this waits for the device."""
        if self._agreed is None:
            self._agreed = self._read(self._arrived().tolist())
        return self._agreed

    def _read(self, values: Sequence[float]) -> StepTotals:
        self._check(values)
        sums, counts, broken = {}, {}, []
        width = 2 * len(self.names)
        for place, name in enumerate(self.names):
            slots = values[_NUM_FLAGS + 2 * place :: width], values[_NUM_FLAGS + 2 * place + 1 :: width]
            for count in slots[1]:
                refuse_count(name, count)
            sums[name], counts[name] = _total(slots[0]), _total(slots[1])
            if not math.isfinite(sums[name]):
                broken += [(index, name) for index, value in enumerate(slots[0]) if not math.isfinite(value)]
        terms = {name: _quotient(sums[name], counts[name], on_empty=self._on_empty) for name in self.names}
        return StepTotals(
            loss=math.fsum(terms.values()) if all(map(math.isfinite, terms.values())) else math.nan,
            terms=terms,
            counts=counts,
            divided_by={name: float(count) for name, count in self._expected.items()},
            stop=values[STOP] > 0,
            buffers_changed=values[BUFFERS] > 0,
            broken=tuple(sorted(broken)),
        )

    def _arrived(self) -> Tensor:
        assert self._vector is not None and self._wait is not None
        self._wait()
        self._wait = _done
        return self._vector

    def _check(self, values: Sequence[float]) -> None:
        if values[MISMATCH]:
            raise DesyncError(
                f"the loss returned different terms than at the first step ({', '.join(self.names)}).",
                where=f"on {int(values[MISMATCH])} of {self._ranks} ranks",
                hint="return the same names for every batch; a term without samples is (0, 0)",
            )
        if values[FINGERPRINT] != self._flags[FINGERPRINT] * self._ranks:
            raise DesyncError(
                f"rank {self._world.rank} read different data than the other ranks.",
                cause=f"a stream: {NOT_SEEDED}, or not on every rank",
                hint=f"{SEED_IT}; or give the dataset shard() and state_dict()",
            )

    def _packed(self) -> Tensor:
        width = 2 * len(self.names)
        if self._world.device.type == "cpu":
            values = [*self._flags, *[0.0] * (self._num_micro * width)]
            for index, terms in self._slots.items():
                flat = [float(part) for name in self.names for part in terms.get(name, (0.0, 0.0))]
                values[_NUM_FLAGS + index * width : _NUM_FLAGS + (index + 1) * width] = flat
            return torch.tensor(values, dtype=torch.float64)
        return self._packed_on_device(width)

    def _packed_on_device(self, width: int) -> Tensor:
        device = self._world.device
        vector = torch.zeros(_NUM_FLAGS + self._num_micro * width, dtype=torch.float64, device=device)
        vector[:_NUM_FLAGS].copy_(torch.tensor(self._flags, dtype=torch.float64).pin_memory(), non_blocking=True)
        for index, terms in self._slots.items():
            for place, part in enumerate(part for name in self.names for part in terms.get(name, (0.0, 0.0))):
                slot = vector[_NUM_FLAGS + index * width + place]
                slot.copy_(part.detach()) if isinstance(part, Tensor) else slot.fill_(part)
        return vector


def joint_counts(local: dict[str, float | Tensor], *, world: World, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the counts summed over all ranks, before the first forward."""
    values = [torch.as_tensor(local.get(name, 0.0), dtype=torch.float64, device=world.device) for name in names]
    vector = world.all_reduce(torch.stack(values))
    return dict(zip(names, vector.unbind(), strict=True))


def _total(values: Sequence[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


def _quotient(total: float, count: float, *, on_empty: str = "stop") -> float:
    if not count and on_empty == "zero" and not total:
        return 0.0
    return total / count if count else math.nan


def _done() -> None:
    return None
