"""The exchange of loss terms, counts and flags between this rank and the others in a step."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paceline.errors import JobError
from paceline.step.loss.loss_return_value import LossContract, Terms
from paceline.step.microbatches import StepBatch
from paceline.step.replica_context import StepContext
from paceline.step.step_reduction import BUFFERS, FINGERPRINT, STOP, StepReduction, joint_counts


def own_counts(contract: LossContract, data: Sequence[Any]) -> dict[str, float | Tensor]:
    """Return the counts of these microbatches alone; the job gives counts before the forward."""
    local: dict[str, float | Tensor] = {}
    for batch in data:
        for name, count in contract.counts(batch).items():
            local[name] = local.get(name, 0.0) + count
    return local


class LossReporter:
    """A reporter of loss terms whose names are agreed once. `tells`: this rank alone reports these terms."""

    def __init__(self, parts: StepContext, *, tells: bool) -> None:
        self._parts = parts
        self._tells = tells
        self._names: tuple[str, ...] | None = None

    @property
    def is_agreed(self) -> bool:
        """True once the names of the terms are known."""
        return self._names is not None

    def agree(self, terms: Terms | None) -> None:
        """Agree on the names of the terms; every rank calls this after the last stage has run a microbatch."""
        self._agreed_names(terms)

    def joint(self, given: StepBatch, terms: Terms | None, *, stop: bool) -> StepReduction:
        """Return this step's empty reduction vector."""
        names = self._agreed_names(terms)
        joint = StepReduction(
            world=self._parts.world, names=names, num_micro=given.num_micro, on_empty=self._parts.update.on_empty
        )
        joint.flag(STOP, float(stop))
        joint.flag(FINGERPRINT, float(given.fingerprint))
        return joint

    def put(self, joint: StepReduction, index: int, terms: Terms) -> None:
        """Put a microbatch's terms into the vector, if this rank is the one that reports them."""
        if self._tells:
            joint.put(index, terms)

    def send(self, joint: StepReduction) -> None:
        """Start the all-reduce of the vector, with the flag for changed buffers."""
        for buffers in self._parts.watched_buffers:
            joint.flag(BUFFERS, float(buffers.changed()))
        joint.start()

    def counts(self, data: Sequence[Any]) -> dict[str, Tensor] | None:
        """Return the counts of the whole batch if the job gives them before the forward, else None."""
        contract = self._parts.contract
        if not contract.counts_first:
            return None
        local = own_counts(contract, data)
        if self._names is None:
            everybody = self._parts.world.gather_json(list(local))
            self._names = tuple(next(names for names in everybody if names))
        return joint_counts(local if self._tells else {}, world=self._parts.world, names=self._names)

    def _agreed_names(self, terms: Terms | None) -> tuple[str, ...]:
        """Return the agreed names of the terms, also on ranks whose first step holds no sample."""
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
