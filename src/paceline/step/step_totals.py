"""The totals of a step over all ranks: one small vector, whose all-reduce overlaps the backward.

`TotalsBuilder` fills the vector with this rank's loss terms, counts and flags. `TotalsReduction` all-reduces the
vector. `StepResult` reads the sum only on demand, because reading waits for the device.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.data.stream.rank_mismatch import NOT_SEEDED_CAUSE, SEED_HINT
from paceline.errors import DesyncError, JobError
from paceline.parallel.data_parallel.module_buffers import BufferPolicy
from paceline.step.local_sgd.message_batching import MessageBatcher
from paceline.step.loss.loss_return_value import LossContract, Terms, check_count
from paceline.step.microbatches import StepBatch

# The positions of the flags at the start of the vector: the rank wants to stop, it has changed a buffer, its loss has
# other terms than before, and the fingerprint of its batch.
STOP, BUFFERS, MISMATCH, FINGERPRINT = range(4)
_NUM_FLAGS = 4
_FINGERPRINT_RANGE = 1 << 24
_COUNT_TOLERANCE = 1e-5  # tolerance for counts that sum fp32 weights in another order


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """The reduced values of one step, the same on every rank.

    `counts` are the counts that the loss returned. `expected_counts` are those that the loss was divided by before
    backward, if they were known.
    """

    loss: float
    terms: dict[str, float]
    counts: dict[str, float]
    expected_counts: dict[str, float]
    stop: bool
    buffers_changed: bool
    nonfinite_terms: tuple[tuple[int, str], ...] = ()
    """The (microbatch index, term name) pairs whose sum is not finite."""

    def check_counts(self) -> None:
        """Check that the loss was divided by the right counts. A wrong count means a wrong gradient.

        Raises:
            JobError: `count=` and the loss count different things.
        """
        for name, expected in self.expected_counts.items():
            actual = self.counts.get(name, 0.0)
            if not math.isclose(expected, actual, rel_tol=_COUNT_TOLERANCE, abs_tol=_COUNT_TOLERANCE):
                raise JobError(
                    f"count= gives {expected:g} for the term {name!r} over the global batch, but "
                    f"the loss returns {actual:g}.",
                    cause="they count different things: samples or tokens, all targets or unmasked ones",
                    hint="count=lambda batch: the same number as the loss returns with its sum",
                )


class TotalsReduction:
    """The reduction vector of one step: flags, then a slot with `(sum, count)` for each term of each microbatch.

    Exactly one rank fills each slot, and the other ranks add zeros. So the order of the sum changes no bit. With exact
    context parallelism, each of the `num_shards` sequence shards of a microbatch has a slot.
    """

    def __init__(
        self, *, world: World, names: Sequence[str], num_micro: int, on_empty: str = "stop", num_shards: int = 1
    ) -> None:
        self._world = world
        self._num_ranks = world.world_size
        self.names = tuple(names)
        self._num_micro, self._num_shards = num_micro, num_shards
        self._on_empty = on_empty
        self._flags = [0.0] * _NUM_FLAGS
        self._slots: dict[int, Terms] = {}
        self._vector: Tensor | None = None
        self._wait_for_sum: Callable[[], object] | None = None
        self._totals: StepTotals | None = None
        self._expected: Mapping[str, Tensor] = {}

    def set_expected_counts(self, counts: Mapping[str, Tensor]) -> None:
        """Store the global counts that the loss is divided by before backward, for `StepTotals.check_counts`."""
        self._expected = counts

    def set_flag(self, index: int, value: float = 1.0) -> None:
        """Set a flag, or store the batch's fingerprint."""
        self._flags[index] = value % _FINGERPRINT_RANGE

    def store_terms(self, microbatch: int, terms: Terms, *, shard: int = 0) -> None:
        """Store the terms of the microbatch with this index, or of one of its sequence shards."""
        if tuple(terms) != self.names:
            self._flags[MISMATCH] = 1.0
        self._slots[microbatch * self._num_shards + shard] = {
            name: (total.detach(), count) for name, (total, count) in terms.items()
        }

    def start(self) -> None:
        """Start the all-reduce. Ranks without a microbatch call this too."""
        self._vector = self._pack()
        self._wait_for_sum = self._world.start_all_reduce(self._vector)

    def reduce_over_sites(self, batcher: MessageBatcher) -> "TotalsReduction":
        """Return a new reduction: the sum of this one over all sites of local SGD, which `batcher` all-reduces.

        Expected counts are not copied, because each site divides by its own counts and has already checked them.
        """
        all_sites = TotalsReduction(
            world=self._world,
            names=self.names,
            num_micro=self._num_micro,
            on_empty=self._on_empty,
            num_shards=self._num_shards,
        )
        all_sites._flags, all_sites._num_ranks = self._flags, self._num_ranks * batcher.peers.world_size
        all_sites._vector = self._wait_for_vector().clone()
        all_sites._wait_for_sum = batcher.add(all_sites._vector)
        return all_sites

    def local_count(self) -> float:
        """Return the sum of the counts of all terms that this rank has stored."""
        return math.fsum(float(count) for terms in self._slots.values() for _, count in terms.values())

    def local_loss(self) -> float:
        """Return the loss of the terms that this rank has stored, each divided by its own count."""
        sums = {name: [0.0, 0.0] for name in self.names}
        for terms in self._slots.values():
            for name, (total, count) in terms.items():
                sums[name] = [sums[name][0] + float(total), sums[name][1] + float(count)]
        return sum(_quotient(total, count) for total, count in sums.values() if total or count)

    def divisor(self) -> float | Tensor:
        """Return the global count of the only term, by which gradients are divided.

        If the count is zero, gradients become NaN, and the finite check reports them. If `on_empty` is "zero", return
        one instead of zero: the term's sum is zero too.
        """
        vector = self._wait_for_vector()
        counts = vector[_NUM_FLAGS + 1 :: 2]
        if vector.device.type == "cpu":
            total = math.fsum(counts.tolist())
            return total or 1.0 if self._on_empty == "zero" else total
        count = counts.sum()
        return torch.where(count == 0, torch.ones_like(count), count) if self._on_empty == "zero" else count

    def wait_for_totals(self) -> StepTotals:
        """Return the reduced values; on a GPU this waits for the device."""
        if self._totals is None:
            self._totals = self._parse(self._wait_for_vector().tolist())
        return self._totals

    def _parse(self, values: Sequence[float]) -> StepTotals:
        """Return the totals that the reduced vector contains."""
        self._refuse_mismatch(values)
        sums, counts, nonfinite_terms = {}, {}, []
        width = 2 * len(self.names)
        for position, name in enumerate(self.names):
            term_sums = values[_NUM_FLAGS + 2 * position :: width]  # of each microbatch
            term_counts = values[_NUM_FLAGS + 2 * position + 1 :: width]
            for count in term_counts:
                check_count(name, count)
            sums[name], counts[name] = _sum_or_nan(term_sums), _sum_or_nan(term_counts)
            if not math.isfinite(sums[name]):
                slots = [index for index, value in enumerate(term_sums) if not math.isfinite(value)]
                nonfinite_terms += [(index, name) for index in sorted({slot // self._num_shards for slot in slots})]
        terms = {name: _quotient(sums[name], counts[name], on_empty=self._on_empty) for name in self.names}
        return StepTotals(
            loss=math.fsum(terms.values()) if all(map(math.isfinite, terms.values())) else math.nan,
            terms=terms,
            counts=counts,
            expected_counts={name: float(count) for name, count in self._expected.items()},
            stop=values[STOP] > 0,
            buffers_changed=values[BUFFERS] > 0,
            nonfinite_terms=tuple(sorted(nonfinite_terms)),
        )

    def _wait_for_vector(self) -> Tensor:
        assert self._vector is not None and self._wait_for_sum is not None
        self._wait_for_sum()
        self._wait_for_sum = _no_wait
        return self._vector

    def _refuse_mismatch(self, values: Sequence[float]) -> None:
        """Raise an error if ranks had different loss terms or different data."""
        if values[MISMATCH]:
            raise DesyncError(
                f"the loss returned different terms than at the first step ({', '.join(self.names)}).",
                where=f"on {int(values[MISMATCH])} of {self._num_ranks} ranks",
                hint="return the same names for every batch; a term without samples is (0, 0)",
            )
        if values[FINGERPRINT] != self._flags[FINGERPRINT] * self._num_ranks:
            raise DesyncError(
                "the ranks have read different data.",
                cause=f"a stream: {NOT_SEEDED_CAUSE}, or depends on the rank",
                hint=f"{SEED_HINT}; or give the dataset shard() and state_dict()",
            )

    def _pack(self) -> Tensor:
        """Return the vector with this rank's flags and slots."""
        width = 2 * len(self.names)
        if self._world.device.type == "cpu":
            values = [*self._flags, *[0.0] * (self._num_micro * self._num_shards * width)]
            for index, terms in self._slots.items():
                slot_values = [float(part) for name in self.names for part in terms.get(name, (0.0, 0.0))]
                values[_NUM_FLAGS + index * width : _NUM_FLAGS + (index + 1) * width] = slot_values
            return torch.tensor(values, dtype=torch.float64)
        return self._pack_on_device(width)

    def _pack_on_device(self, width: int) -> Tensor:
        device = self._world.device
        vector = torch.zeros(
            _NUM_FLAGS + self._num_micro * self._num_shards * width, dtype=torch.float64, device=device
        )
        vector[:_NUM_FLAGS].copy_(torch.tensor(self._flags, dtype=torch.float64).pin_memory(), non_blocking=True)
        for index, terms in self._slots.items():
            for position, part in enumerate(part for name in self.names for part in terms.get(name, (0.0, 0.0))):
                slot = vector[_NUM_FLAGS + index * width + position]
                slot.copy_(part.detach()) if isinstance(part, Tensor) else slot.fill_(part)
        return vector


class AsyncScalars:
    """Scalars that are copied from the device asynchronously; `values` waits only for that copy."""

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
        """Return the scalars as a flat list."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        values: list[float] = self._host.reshape(-1).tolist()
        return values


@dataclass(kw_only=True)
class StepResult:
    """The result of one optimizer step. `loss`, `terms` and `grad_norm` are global: the same on every rank.

    `samples` is the number of samples in the global batch. `skipped` is True if the update was skipped. `lr` is the
    learning rate of the update, if the step has recorded it.
    """

    step: int
    samples: int
    reduction: TotalsReduction
    async_grad_norm: AsyncScalars | None
    compute_seconds: float
    communication_seconds: float
    skipped: bool = False
    lr: float | None = None

    @cached_property
    def totals(self) -> StepTotals:
        """The reduced values of the step."""
        return self.reduction.wait_for_totals()

    @property
    def loss(self) -> float:
        """The loss of the global batch: the sum over the terms of sum / count."""
        return self.totals.loss

    @property
    def terms(self) -> dict[str, float]:
        """Each term's sum divided by its count."""
        return self.totals.terms

    @cached_property
    def grad_norm(self) -> float | None:
        """The norm of the global gradient before clipping, or None if it was not measured."""
        return None if self.async_grad_norm is None else self.async_grad_norm.values()[0]

    @property
    def skip_text(self) -> str:
        """A line that says that all ranks have skipped this step."""
        norm = "" if self.grad_norm is None else f", the gradient norm {self.grad_norm:.6g}"
        return f"step {self.step} is skipped on all ranks: the loss is {self.loss:.6g}{norm}"

    @property
    def is_finite(self) -> bool:
        """True if the loss and the gradient norm are finite."""
        return math.isfinite(self.loss) and (self.grad_norm is None or math.isfinite(self.grad_norm))


class TotalsBuilder:
    """The builder of a step's vector: it stores this rank's loss terms and flags, and starts the all-reduce.

    In the first step, all ranks agree on the names of the terms.

    `reports_loss`: this rank reports the terms that it computes, for all ranks that compute the same terms.
    `buffers`: a list with the policy of the model's buffers, or an empty list if no buffer is watched.
    """

    def __init__(
        self,
        *,
        world: World,
        contract: LossContract,
        buffers: Sequence[BufferPolicy],
        reports_loss: bool,
        on_empty: str,
        num_shards: int = 1,
    ) -> None:
        self._world = world
        self._contract = contract
        self._buffers = buffers
        self._reports_loss = reports_loss
        self._on_empty = on_empty
        self._num_shards = num_shards
        self._names: tuple[str, ...] | None = None

    @property
    def has_names(self) -> bool:
        """True once the names of the terms are known."""
        return self._names is not None

    def new_reduction(self, step_batch: StepBatch, terms: Terms | None, *, stop: bool) -> TotalsReduction:
        """Return this step's reduction with its flags set. `terms` are one microbatch's terms, or None without samples.

        All ranks call this.
        """
        names = self.agree_on_names(terms)
        reduction = TotalsReduction(
            world=self._world,
            names=names,
            num_micro=step_batch.num_micro,
            on_empty=self._on_empty,
            num_shards=self._num_shards,
        )
        reduction.set_flag(STOP, float(stop))
        reduction.set_flag(FINGERPRINT, float(step_batch.fingerprint))
        return reduction

    def store_terms(self, reduction: TotalsReduction, index: int, terms: Terms, *, shard: int = 0) -> None:
        """Store the terms of a microbatch, or of one of its sequence shards, if this rank reports them."""
        if self._reports_loss:
            reduction.store_terms(index, terms, shard=shard)

    def start_reduction(self, reduction: TotalsReduction) -> None:
        """Set the flag for changed buffers, and start the all-reduce of the vector."""
        for buffers in self._buffers:
            reduction.set_flag(BUFFERS, float(buffers.has_changed()))
        reduction.start()

    def gather_counts(self, data: Sequence[Any]) -> dict[str, Tensor] | None:
        """Return the counts of the global batch by term, or None if the job does not give them before the forward.

        `data` has this rank's microbatches. All ranks call this.
        """
        if not self._contract.has_early_counts:
            return None
        local = local_counts(self._contract, data)
        if self._names is None:
            names_by_rank = self._world.gather_json(list(local))
            self._names = tuple(next(names for names in names_by_rank if names))
        return global_counts(local if self._reports_loss else {}, world=self._world, names=self._names)

    def agree_on_names(self, terms: Terms | None) -> tuple[str, ...]:
        """Return the names of the terms. All ranks call this; a rank whose first step has no sample passes None."""
        if self._names is None:
            names_by_rank = self._world.gather_json(None if terms is None else list(terms))
            first = next(names for names in names_by_rank if names is not None)
            if len(first) > 1 and not (self._contract.has_early_counts or self._contract.over_batch):
                raise JobError(
                    f"the loss has {len(first)} terms ({', '.join(first)}), each with its own count.",
                    cause="their counts over all ranks must be known before the first backward",
                    hint=f"count=lambda batch: {{{first[0]!r}: number, ...}}, with an entry for each term",
                )
            self._names = tuple(first)
        return self._names


def local_counts(contract: LossContract, data: Sequence[Any]) -> dict[str, float | Tensor]:
    """Return the count of each term, summed over these microbatches, from the job's `count=`."""
    local: dict[str, float | Tensor] = {}
    for batch in data:
        for name, count in contract.counts(batch).items():
            local[name] = local.get(name, 0.0) + count
    return local


def global_counts(local: dict[str, float | Tensor], *, world: World, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the count of each term, summed over all ranks of `world`."""
    values = [torch.as_tensor(local.get(name, 0.0), dtype=torch.float64, device=world.device) for name in names]
    vector = world.all_reduce(torch.stack(values))
    return dict(zip(names, vector.unbind(), strict=True))


def _sum_or_nan(values: Sequence[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


def _quotient(total: float, count: float, *, on_empty: str = "stop") -> float:
    """Return `total / count`, or NaN if the count is zero. If `on_empty` is "zero" and both are zero, return zero."""
    if not count and on_empty == "zero" and not total:
        return 0.0
    return total / count if count else math.nan


def _no_wait() -> None:
    return None
