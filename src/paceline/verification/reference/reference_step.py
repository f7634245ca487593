"""One step of the reference: its start, gradient and noise floors. It can be computed again, with variations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from paceline.verification.noise_floor import ModelSnapshot, NoiseFloors, measure_floors
from paceline.verification.reference.loss_terms import sum_target_counts
from paceline.verification.reference.reference import Reference, ReferenceGradient, ReferenceMicrobatch, RunPosition

Tensors = Mapping[str, Tensor]


@dataclass(kw_only=True)
class ReferenceStep:
    """One step of the reference."""

    reference: Reference
    position: RunPosition
    start: ModelSnapshot
    """The weights, buffers and random state before the step."""
    microbatches: Sequence[ReferenceMicrobatch]
    gradient: ReferenceGradient

    @cached_property
    def floors(self) -> NoiseFloors:
        """The noise floors of this step."""
        return measure_floors(
            self.reference, self.gradient, position=self.position, microbatches=self.microbatches, start=self.start
        )

    @cached_property
    def global_counts(self) -> dict[str, float] | None:
        """The global counts by loss term; None if the job does not give them before the forward."""
        return sum_target_counts(self.reference.job, [micro.data for micro in self.microbatches])

    @property
    def is_rounding_dominated(self) -> bool:
        """True if rounding alone may explain any difference; False if the floors were never measured."""
        return "floors" in vars(self) and self.floors.is_rounding_dominated

    def floor(self, name: str) -> float:
        """Return the noise floor of this parameter's gradient."""
        return self.floors.gradients.get(name, 0.0)

    def compute_again(
        self,
        *,
        keep_contributions: Sequence[str] = (),
        term: str | None = None,
        random_microbatch: Callable[[int], int] = int,
    ) -> ReferenceGradient:
        """Compute the step again from the same start; the model's state afterwards is as before the call."""
        state_after = ModelSnapshot(self.reference.model)
        self.start.restore()
        gradient = self.reference.compute_gradient(
            self.position,
            microbatches=self.microbatches,
            keep_contributions=keep_contributions,
            term=term,
            random_microbatch=random_microbatch,
        )
        state_after.restore()
        return gradient


def run_reference_step(reference: Reference, position: RunPosition) -> ReferenceStep:
    """Run the forwards and backwards of the reference's step at `position`. The weights are not updated."""
    start = ModelSnapshot(reference.model)
    microbatches = reference.read_microbatches(position)
    gradient = reference.compute_gradient(position, microbatches=microbatches)
    return ReferenceStep(
        reference=reference, position=position, start=start, microbatches=microbatches, gradient=gradient
    )
