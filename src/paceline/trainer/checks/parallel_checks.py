"""Checks of a job for `cp` and `ep`: which dimension is the sequence, and that the split model gives equal results."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.mesh_groups import MeshGroups
from paceline.errors import JobError, LayoutError
from paceline.job import Job
from paceline.parallel.context_parallel.context_parallel import ContextParallel
from paceline.parallel.context_parallel.context_parallel_check import check_context
from paceline.parallel.context_parallel.exact_context import ExactContextParallel
from paceline.parallel.context_parallel.sequence_sharding import batch_length, sequence_hint
from paceline.parallel.expert_parallel.expert_parallel_check import check_experts
from paceline.parallel.module_access.model_copy import copy_model
from paceline.step.loss.loss_return_value import LossContract
from paceline.torch_internals.rng import preserve_rng
from paceline.trainer.checks.example_batch import ExampleBatch

_DEFAULT_KEY = "input_ids"
_MAX_ELEMENTS = 50_000_000  # the most parameters of a model that counts as small
_MAX_LENGTHS = 3  # how many lengths are checked besides the first batch's length
NOT_COMPARED_NOTE = (
    "{}: the split model was not compared with the unsplit one, because it is large; `paceline verify` compares them"
)


def build_context_parallel(
    job: Job,
    *,
    model: nn.Module,
    contract: LossContract,
    worlds: MeshGroups,
    example: ExampleBatch,
    sequence_shards: int | None = None,
) -> ContextParallel | ExactContextParallel | None:
    """Return the object that splits sequences and runs the model on the slices, or None if sequences are not split.

    With `sequence_shards`, exact mode computes each sequence in this number of parts, on one `cp` rank too.

    Raises:
        JobError: the job does not name the sequence dimension.
        LayoutError: a layer can't be split along the sequence, or the slices give a different result.
    """
    num_parts = sequence_shards or worlds.cp.world_size
    if num_parts == 1:
        return None
    sequence = _sequence_dims(job, example)
    length_check: BatchLengthCheck | None = None
    if is_model_small(model) and not worlds.all_ranks.is_simulated:
        check_batch = try_context_parallel(job, model=model, contract=contract, ranks=num_parts, example=example)
        if _holds_full_weights(worlds):
            length_check = BatchLengthCheck(
                model, check_batch, first_length=batch_length(example.small_batch, sequence=sequence)
            )
    arguments: dict[str, Any] = {
        "model": model,
        "sequence": sequence,
        "world": worlds.cp,
        "is_model_loss": contract.is_model_loss,
        "check_length": length_check,
    }
    context = (
        ContextParallel(**arguments)
        if sequence_shards is None
        else ExactContextParallel(num_shards=sequence_shards, **arguments)
    )
    if context.should_shift_labels:
        contract.mark_labels_shifted()
    return context


def try_context_parallel(
    job: Job, *, model: nn.Module, contract: LossContract, ranks: int, example: ExampleBatch
) -> Callable[..., None]:
    """Check on a few samples that slices of the sequences give the same result as the full sequences.

    Return a function that checks another batch in this way.

    Raises:
        JobError: the job does not name the sequence dimension.
        LayoutError: a layer can't be split along the sequence, or the slices give a different result.
    """
    check_batch = partial(
        check_context,
        sequence=_sequence_dims(job, example),
        ranks=ranks,
        forward=contract.forward,
        loss=job.loss,
        is_model_loss=contract.is_model_loss,
    )
    check_batch(model=model, batch=example.small_batch)
    return check_batch


class BatchLengthCheck:
    """A check of batches whose sequences have another length than the first batch. It checks a few lengths, each once.

    Every rank of the `cp` axis has the same batch and weights, so all ranks get the same result without communication.
    """

    def __init__(self, model: nn.Module, check_batch: Callable[..., None], *, first_length: int) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._model = copy_model(model, shared=tensors)  # the model before it is parallelized
        self._check_batch, self._checked_lengths = check_batch, {first_length}

    def __call__(self, batch: Any, length: int) -> None:
        """Check a batch whose sequences have this length, and raise a LayoutError if they can't be split."""
        if length in self._checked_lengths or len(self._checked_lengths) > _MAX_LENGTHS:
            return
        self._checked_lengths.add(length)
        try:
            with preserve_rng():
                self._check_batch(model=self._model, batch=batch)
        except torch.OutOfMemoryError:
            return  # the optimizer state leaves no memory for the check
        except LayoutError as error:
            raise LayoutError(
                f"at a length of {length}, which differs from the first batch, {error.what}",
                cause=error.cause,
                hint=error.hint,
            ) from None


def _holds_full_weights(worlds: MeshGroups) -> bool:
    """Return True if every rank holds the full weights during a step, as it did before the model was parallelized."""
    mesh = worlds.mesh
    return mesh.pp == mesh.tp == mesh.ep == 1 and mesh.dp_shard == 1


def try_expert_parallel(*, model: nn.Module, contract: LossContract, example: ExampleBatch) -> None:
    """Check that the model gives the same result if other ranks hold some of its experts.

    Raises:
        LayoutError: the experts can't be spread, or the result differs.
    """
    check_experts(model=model, batches=[example.small_batch, example.small_batch], forward=contract.forward)


def is_model_small(model: nn.Module) -> bool:
    """Return True if this rank has the full model, small enough for a few extra runs in double precision."""
    parameters = list(model.parameters())
    return is_small_enough(sum(p.numel() for p in parameters)) and not any(p.is_meta for p in parameters)


def is_small_enough(elements: int) -> bool:
    """Return True if a model with this many parameters is small enough for extra runs in double precision."""
    return elements <= _MAX_ELEMENTS


def _sequence_dims(job: Job, example: ExampleBatch) -> Mapping[str, int]:
    """Return the sequence dimension of each tensor of the batch that has one, by the tensor's key."""
    if job.sequence is not None:
        return {str(name): dim for name, dim in job.sequence.items()}
    example_batch = example.batch
    if (
        isinstance(example_batch, Mapping)
        and isinstance(example_batch.get(_DEFAULT_KEY), Tensor)
        and example_batch[_DEFAULT_KEY].dim() > 1
    ):
        return {_DEFAULT_KEY: 1}
    raise JobError(
        "cp splits sequences, but the job does not say which dimension of its batch is the sequence.",
        cause="only a dict with input_ids has a known sequence dimension",
        hint=sequence_hint(example_batch),
    )
