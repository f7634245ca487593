"""What this rank tells the others in a step, and what it hears: terms, counts, flags."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paceline.errors import JobError
from paceline.step.loss.loss_return_value import LossContract, Terms
from paceline.step.microbatches import StepBatch
from paceline.step.replica_context import StepContext
from paceline.step.step_reduction import BUFFERS, FINGERPRINT, STOP, StepReduction, joint_counts


def own_counts(contract: LossContract, data: Sequence[Any]) -> dict[str, float | Tensor]:
    """Of these microbatches alone, where the job gives counts before the forward."""
    local: dict[str, float | Tensor] = {}
    for batch in data:
        for name, count in contract.counts(batch).items():
            local[name] = local.get(name, 0.0) + count
    return local


class LossReporter:
    """The names of the terms are agreed on once. `tells`: no other rank gives what this one does."""

    def __init__(self, parts: StepContext, *, tells: bool) -> None:
        self._parts = parts
        self._tells = tells
        self._names: tuple[str, ...] | None = None

    @property
    def is_agreed(self) -> bool:
        """Whether the names of the terms are known."""
        return self._names is not None

    def agree(self, terms: Terms | None) -> None:
        """Every rank calls this, once the last stage has had a microbatch."""
        self._agreed_names(terms)

    def joint(self, given: StepBatch, terms: Terms | None, *, stop: bool) -> StepReduction:
        """The vector of this step, before anything was put into it."""
        names = self._agreed_names(terms)
        joint = StepReduction(
            world=self._parts.world, names=names, num_micro=given.num_micro, on_empty=self._parts.update.on_empty
        )
        joint.flag(STOP, float(stop))
        joint.flag(FINGERPRINT, float(given.fingerprint))
        return joint

    def put(self, joint: StepReduction, index: int, terms: Terms) -> None:
        """Give a microbatch's terms, on one of the ranks that have them."""
        if self._tells:
            joint.put(index, terms)

    def send(self, joint: StepReduction) -> None:
        """With what has become of the buffers until now."""
        joint.flag(BUFFERS, float(self._parts.buffers.changed()))
        joint.start()

    def counts(self, data: Sequence[Any]) -> dict[str, Tensor] | None:
        """The counts of the whole batch, where the job gives them before the forward."""
        contract = self._parts.contract
        if not contract.counts_first:
            return None
        local = own_counts(contract, data)
        if self._names is None:
            everybody = self._parts.world.gather_json(list(local))
            self._names = tuple(next(names for names in everybody if names))
        return joint_counts(local if self._tells else {}, world=self._parts.world, names=self._names)

    def _agreed_names(self, terms: Terms | None) -> tuple[str, ...]:
        """Also for ranks whose first step holds no sample."""
        if self._names is None:
            everybody = self._parts.world.gather_json(None if terms is None else list(terms))
            first = next(names for names in everybody if names is not None)
            contract = self._parts.contract
            if len(first) > 1 and not (contract.counts_first or contract.over_batch):
                raise JobError(
                    f"the loss has {len(first)} terms ({', '.join(first)}), each with its own count.",
                    cause="their counts over all ranks must be known before the first backward",
                    hint="count=lambda batch: {name: number for each term}",
                )
            self._names = tuple(first)
        return self._names
