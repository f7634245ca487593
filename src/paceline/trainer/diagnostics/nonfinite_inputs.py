"""The search for NaN and infinity in the inputs of a step whose loss or gradient is not finite."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.data.types import ReplicaMicrobatch, StepInput
from paceline.errors import NonFiniteError
from paceline.torch_internals.pytree import tensor_leaves

_MAX_SHOWN = 4


def explain_nonfinite_inputs(
    error: NonFiniteError, step_batch: StepInput, *, world: World, over_batch: bool = False
) -> NonFiniteError:
    """Add to the error which microbatches had a non-finite loss, on which ranks, and which samples are not finite.

    Every rank must call this, since all ranks raise the same error. An error about a term without a target is returned
    unchanged, because data may mark missing targets with NaN. With `over_batch`, the loss covers the whole batch, so
    the error names no microbatches and ranks.
    """
    if error.no_target:
        return error
    local_samples = sorted({sample for micro in step_batch.micro for sample in _bad_samples(micro)})
    by_rank = [[local_samples, [micro.index for micro in step_batch.micro]]]
    with suppress(Exception):  # another rank may have exited for its own reason
        by_rank = world.gather_json(by_rank[0])
    is_known = 1 < world.world_size == len(by_rank)
    microbatches_by_rank = {rank: indices for rank, (_, indices) in enumerate(by_rank)} if is_known else {}
    nonfinite_microbatches = set() if over_batch else {index for index, _ in error.nonfinite_terms}
    error.where = (
        ""
        if over_batch
        else describe_microbatches(error.nonfinite_terms, microbatches_by_rank, num_micro=step_batch.num_micro)
    )
    error.ranks = tuple(rank for rank, indices in microbatches_by_rank.items() if nonfinite_microbatches & set(indices))
    bad_samples = sorted({sample for rank_samples, _ in by_rank for sample in rank_samples})
    if not bad_samples:
        return error
    sample_text = ", ".join(map(str, bad_samples[:_MAX_SHOWN])) + (
        f" and {len(bad_samples) - _MAX_SHOWN} more" if len(bad_samples) > _MAX_SHOWN else ""
    )
    error.cause = (
        f"the inputs of this step contain NaN or infinity: sample{'s' * (len(bad_samples) > 1)} "
        f"{sample_text} of train_data"
    )
    error.hint = f"train_data[{bad_samples[0]}] shows it; or --train.on_nonfinite skip, which skips the whole step"
    return error


def describe_microbatches(
    nonfinite_terms: Sequence[tuple[int, str]], microbatches_by_rank: Mapping[int, Sequence[int]], *, num_micro: int
) -> str:
    """Return the text that names the microbatches with a non-finite loss, and their ranks if they are known."""
    microbatches = []
    for index in dict.fromkeys(index for index, _ in nonfinite_terms):
        ranks = [str(rank) for rank, indices in microbatches_by_rank.items() if index in indices]
        rank_text = f" (rank{'s' * (len(ranks) > 1)} {', '.join(ranks)})" if ranks else ""
        microbatches.append(f"{index + 1}{rank_text}")
    if not microbatches:
        return ""
    names = list(dict.fromkeys(name for _, name in nonfinite_terms))
    term = f"the term{'s' * (len(names) > 1)} {', '.join(names)} of " if names != ["loss"] else "the loss of "
    more_text = f" and {len(microbatches) - _MAX_SHOWN} more" if len(microbatches) > _MAX_SHOWN else ""
    noun = "microbatch" if len(microbatches) == 1 else "microbatches"
    return f"{term}{noun} {', '.join(microbatches[:_MAX_SHOWN])}{more_text}, of {num_micro} in this step"


def _bad_samples(micro: ReplicaMicrobatch) -> Iterator[int]:
    """Yield the samples with non-finite inputs. If a tensor does not have one row per sample, yield all samples."""
    for tensor in tensor_leaves(micro.data):
        if tensor.is_floating_point() or tensor.is_complex():
            yield from _bad_rows(tensor, micro)


def _bad_rows(tensor: Tensor, micro: ReplicaMicrobatch) -> Iterator[int]:
    finite: Any = torch.isfinite(tensor)
    if bool(finite.all()):
        return
    if tensor.dim() == 0 or tensor.shape[0] != len(micro.indices):
        yield from micro.indices
        return
    rows = finite.reshape(len(micro.indices), -1).all(dim=1).tolist()
    yield from (index for index, is_finite in zip(micro.indices, rows, strict=True) if not is_finite)
