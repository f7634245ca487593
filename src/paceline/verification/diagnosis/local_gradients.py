"""Find where a wrong gradient arises: every rank runs its own microbatches again, without reduction.

If a rank's own gradient is already wrong, its forward or backward is at fault; if every rank's own gradients are
right, the reduction is.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from paceline.data.types import StepInput
from paceline.torch_internals.pytree import to_device
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.verification.diagnosis.rerun import ReferenceRerun, linear_view
from paceline.verification.reference.loss_terms import weighted_loss

MOST_NAMES = 8
_COARSE_BITS = (2.5, 14.0)
_FEW_BITS = (5.0, 40.0)

Own = Mapping[int, Tensor]


def can_replay(built: TrainingSetup) -> bool:
    """Return True if every rank can run its own microbatches alone.

    It can't if a forward communicates with other ranks, if a rank holds only a part of the model or of a sample, or if
    the loss is scaled (fp16).
    """
    replica, everybody = built.step.replica, built.worlds.data.world_size == built.world.world_size
    is_apart = not (replica.needs_equal_microbatches or any(tape.waits for tape in replica.tapes))
    return is_apart and built.update.scaler is None and built.kept.is_whole and everybody


def own_gradients(
    built: TrainingSetup, given: StepInput, *, names: Sequence[str], known: Mapping[str, float] | None
) -> dict[int, Tensor] | None:
    """Return the gradients of `names` for each of this rank's microbatches, flat and concatenated.

    None if the model does not support gradients of single parameters, as under reentrant checkpointing.
    """
    replica, found = built.step.replica, {}
    targets = {member.name: member.parameter for member in built.named if member.name in names}
    for tape in replica.tapes:
        tape.begin()
    for micro in given.micro:
        replica.streams.enter(step=built.step.steps_done, microbatch=micro.index)
        for tape in replica.tapes:
            tape.at(micro.index)
        batch = to_device(micro.data, replica.world.device)
        with built.step.autocast():
            output = replica.contract.forward(replica.model, batch)
            terms = replica.contract.terms(output, batch, num_samples=micro.num_samples)
        asked = [targets[name] for name in names]
        try:
            gradients = torch.autograd.grad(weighted_loss(terms, known), asked, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            return None
        found[micro.index] = flatten_gradients(dict(zip(names, gradients, strict=True)), targets)
    for tape in replica.tapes:
        tape.begin()
    return found


def flatten_gradients(parts: Mapping[str, Tensor | None], like: Mapping[str, Tensor]) -> Tensor:
    """Return the gradients flat, in the order of `parts`; zeros where there is no gradient."""
    values = [torch.zeros_like(like[name]) if value is None else value for name, value in parts.items()]
    return torch.cat([linear_view(value) for value in values])


def microbatch_gradients(built: TrainingSetup, mine: Own, *, num_micro: int, size: int) -> dict[int, Tensor]:
    """Return every microbatch's own gradients, on every rank."""
    world, found = built.world, {}
    for index in range(num_micro):
        value = mine.get(index, torch.zeros(size, dtype=torch.float64)).to(world.device)
        found[index] = world.broadcast(value, source=index % world.world_size).cpu()
    return found


def replay_cause(
    inquiry: ReferenceRerun, own: Own, *, names: Sequence[str], found: Tensor, ranks: int
) -> tuple[str, str]:
    """Return the cause and the ranks. `found`: the reduced gradient times the divisor, flat as the values of `own`."""
    detailed = inquiry.again(keep=names)
    like = {name: value for name, value in inquiry.start.tensors.items() if name in names}
    right = [flatten_gradients({name: part.get(name) for name in names}, like) for part in detailed.parts]
    floor = math.hypot(*(inquiry.floor(name) for name in names)) * detailed.divisor
    apart = {j: float((own[j] - value).norm()) for j, value in enumerate(right)}
    bad = [j for j, value in apart.items() if not value <= floor]
    if not bad:
        bits = _bits(float((found - sum(right)).norm()), math.hypot(*(float(value.norm()) for value in right)))
        fine = "every rank's own gradients are right before the reduction"
        if _FEW_BITS[0] < bits < _FEW_BITS[1]:
            about = f"{fine}, but their sum is right to about {bits:.0f} bits only: added or sent in a lower precision"
            return f"{about} (bf16 keeps 8 bits, fp16 11, fp32 24)", ""
        return f"{fine}: their reduction is wrong, in an unusual way", ""
    wrong = sorted({j % ranks for j in bad})
    which = f"rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
    who = "every rank" if len(wrong) == ranks else which
    bits = median(_bits(apart[j], float(right[j].norm())) for j in bad)
    why = "code that depends on the rank, a tensor that is not a buffer, a separate random generator"
    if _COARSE_BITS[0] < bits < _COARSE_BITS[1]:
        why = f"right to about {bits:.0f} bits only, so a lower precision (bf16 autocast, TF32), or {why}"
    return (
        f"the forward or backward of {who} gives a different gradient than one process, from the same samples, weights "
        f"and random keys, before any reduction (microbatch {bad[0]} first): {why}"
    ), who


def _bits(error: float, size: float) -> float:
    return -math.log2(error / size) if error > 0.0 and size > 0.0 and math.isfinite(error) else 0.0
