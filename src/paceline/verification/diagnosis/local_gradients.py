"""Find where a wrong gradient arises: every rank runs its own microbatches again, without reduction.

If a rank's local gradient is already wrong, the fault is in this rank's forward or backward. If all local gradients are
right, the fault is in the reduction.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from paceline.data.types import StepInput
from paceline.torch_internals.pytree import to_device
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.verification.diagnosis.gradient_diagnosis import sample_elements
from paceline.verification.reference.loss_terms import weighted_loss
from paceline.verification.reference.reference_step import ReferenceStep

MAX_NAMES = 8  # the number of parameters that are examined
# a number of correct bits in these ranges suggests a lower precision: of the forward, or of the reduction
_LOW_PRECISION_BITS = (2.5, 14.0)
_REDUCED_PRECISION_BITS = (5.0, 40.0)

LocalGradients = Mapping[int, Tensor]  # flat gradients by microbatch


def can_run_locally(setup: TrainingSetup) -> bool:
    """Return True if every rank can run its own microbatches alone.

    Return False if a forward communicates with other ranks, if a rank holds only a part of the model or of a sample, or
    if the loss is scaled (fp16).
    """
    replica, all_ranks_are_replicas = setup.step.replica, setup.worlds.data.world_size == setup.world.world_size
    is_independent = not (
        replica.needs_equal_microbatches or any(recorder.is_sequential for recorder in replica.state_recorders)
    )
    return is_independent and setup.update.scaler is None and setup.optim_shards.is_unsharded and all_ranks_are_replicas


def compute_local_gradients(
    setup: TrainingSetup, step_input: StepInput, *, names: Sequence[str], global_counts: Mapping[str, float] | None
) -> dict[int, Tensor] | None:
    """Return the gradients of the parameters `names`, as one flat tensor for each of this rank's microbatches.

    Return None if the model does not support gradients of single parameters, as under reentrant checkpointing.
    """
    replica, gradients_by_microbatch = setup.step.replica, {}
    targets = {member.name: member.parameter for member in setup.named_parameters if member.name in names}
    for recorder in replica.state_recorders:
        recorder.begin_step()
    for micro in step_input.micro:
        replica.random_streams.enter(step=setup.step.steps_done, microbatch=micro.index)
        for recorder in replica.state_recorders:
            recorder.set_microbatch(micro.index)
        batch = to_device(micro.data, replica.world.device)
        with setup.step.replica.autocast():
            output = replica.contract.forward(replica.model, batch)
            terms = replica.contract.terms(output, batch, num_samples=micro.num_samples)
        parameters = [targets[name] for name in names]
        try:
            gradients = torch.autograd.grad(weighted_loss(terms, global_counts), parameters, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            return None
        gradients_by_microbatch[micro.index] = flatten_gradients(dict(zip(names, gradients, strict=True)), targets)
    for recorder in replica.state_recorders:
        recorder.begin_step()
    return gradients_by_microbatch


def flatten_gradients(gradients: Mapping[str, Tensor | None], like: Mapping[str, Tensor]) -> Tensor:
    """Return the gradients as one flat tensor, in the order of the mapping.

    A gradient of None becomes zeros of the shape in `like`. Of a large gradient, only a sample of elements is included.
    """
    values = [torch.zeros_like(like[name]) if value is None else value for name, value in gradients.items()]
    return torch.cat([sample_elements(value) for value in values])


def gather_local_gradients(
    setup: TrainingSetup, local_gradients: LocalGradients, *, num_micro: int, size: int
) -> dict[int, Tensor]:
    """Gather the local gradients of all `num_micro` microbatches on every rank; each has `size` elements."""
    world, gathered = setup.world, {}
    for index in range(num_micro):
        value = local_gradients.get(index, torch.zeros(size, dtype=torch.float64)).to(world.device)
        gathered[index] = world.broadcast(value, source=index % world.world_size).cpu()
    return gathered


def local_gradient_cause(
    reference_step: ReferenceStep, local_gradients: LocalGradients, *, names: Sequence[str], reduced: Tensor, ranks: int
) -> tuple[str, str]:
    """Return the cause of a wrong gradient, and the names of the ranks whose local gradient is wrong (may be empty).

    `reduced` is the layout's gradient after the reduction, flattened and multiplied by the divisor.
    """
    detailed = reference_step.compute_again(keep_contributions=names)
    parameters = {name: value for name, value in reference_step.start.tensors.items() if name in names}
    expected = [
        flatten_gradients({name: contribution.get(name) for name in names}, parameters)
        for contribution in detailed.contributions
    ]
    floor = math.hypot(*(reference_step.floor(name) for name in names)) * detailed.divisor
    distances = {index: float((local_gradients[index] - value).norm()) for index, value in enumerate(expected)}
    differing = [index for index, distance in distances.items() if not distance <= floor]
    if not differing:
        bits = _accurate_bits(
            float((reduced - sum(expected)).norm()), math.hypot(*(float(value.norm()) for value in expected))
        )
        prefix = "every rank's own gradients are right before the reduction"
        if _REDUCED_PRECISION_BITS[0] < bits < _REDUCED_PRECISION_BITS[1]:
            text = f"{prefix}, but their sum is right to about {bits:.0f} bits only: added or sent in a lower precision"
            return f"{text} (bf16 keeps 8 bits, fp16 11, fp32 24)", ""
        return f"{prefix}: their reduction is wrong, in an unusual way", ""
    wrong_ranks = sorted({index % ranks for index in differing})
    ranks_text = f"rank{'s' if len(wrong_ranks) > 1 else ''} {', '.join(map(str, wrong_ranks))}"
    subject = "every rank" if len(wrong_ranks) == ranks else ranks_text
    bits = median(_accurate_bits(distances[index], float(expected[index].norm())) for index in differing)
    reason = "code that depends on the rank, a tensor that is not a buffer, a separate random generator"
    if _LOW_PRECISION_BITS[0] < bits < _LOW_PRECISION_BITS[1]:
        reason = f"right to about {bits:.0f} bits only, so a lower precision (bf16 autocast, TF32), or {reason}"
    return (
        f"the forward or backward of {subject} gives a different gradient than one process, from the same samples, "
        f"weights and random keys, before any reduction (microbatch {differing[0]} first): {reason}"
    ), subject


def _accurate_bits(error: float, size: float) -> float:
    """Return the number of correct leading bits of a value with this error; 0 if it is not known."""
    return -math.log2(error / size) if error > 0.0 and size > 0.0 and math.isfinite(error) else 0.0
