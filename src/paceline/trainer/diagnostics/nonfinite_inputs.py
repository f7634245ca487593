"""A check of a failed, non-finite step: whether its inputs were non-finite as well."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.data.types import LocalMicro, StepInput
from paceline.errors import NonFiniteError
from paceline.torch_internals.pytree import tensor_leaves

_MOST_SHOWN = 4


def name_inputs(error: NonFiniteError, given: StepInput, *, world: World, over_batch: bool = False) -> NonFiniteError:
    """Add to the error which microbatches had non-finite losses, on which ranks, and any NaN or infinity in the batch.

    Every rank must call this, since all ranks raise the same error. An error about a term without a target is returned
    unchanged: data may mark missing targets with NaN. With `over_batch`, a loss covers the whole batch, so it belongs
    to no single rank.
    """
    if error.no_target:
        return error
    mine = sorted({sample for micro in given.micro for sample in _bad_samples(micro)})
    everywhere = [[mine, [micro.index for micro in given.micro]]]
    with suppress(Exception):  # another rank may have exited for its own reason
        everywhere = world.gather_json(everywhere[0])
    is_known = 1 < world.world_size == len(everywhere)
    held = {rank: indices for rank, (_, indices) in enumerate(everywhere)} if is_known else {}
    broken = set() if over_batch else {index for index, _ in error.broken}
    error.where = "" if over_batch else place_of(error.broken, held, num_micro=given.num_micro)
    error.ranks = tuple(rank for rank, indices in held.items() if broken & set(indices))
    bad = sorted({sample for found, _ in everywhere for sample in found})
    if not bad:
        return error
    shown = ", ".join(map(str, bad[:_MOST_SHOWN])) + (f" and {len(bad) - _MOST_SHOWN} more" if len(bad) > 4 else "")
    error.cause = f"the inputs of this step contain NaN or infinity: sample{'s' * (len(bad) > 1)} {shown} of train_data"
    error.hint = f"train_data[{bad[0]}] shows it; or --train.on_nonfinite skip, which skips the whole step"
    return error


def place_of(broken: Sequence[tuple[int, str]], held: Mapping[int, Sequence[int]], *, num_micro: int) -> str:
    """Return the text that names the microbatches with a non-finite loss, and their ranks if they are known."""
    places = []
    for index in dict.fromkeys(index for index, _ in broken):
        ranks = [str(rank) for rank, indices in held.items() if index in indices]
        on = f" (rank{'s' * (len(ranks) > 1)} {', '.join(ranks)})" if ranks else ""
        places.append(f"{index + 1}{on}")
    if not places:
        return ""
    names = list(dict.fromkeys(name for _, name in broken))
    term = f"the term{'s' * (len(names) > 1)} {', '.join(names)} of " if names != ["loss"] else "the loss of "
    more = f" and {len(places) - _MOST_SHOWN} more" if len(places) > _MOST_SHOWN else ""
    one = "microbatch" if len(places) == 1 else "microbatches"
    return f"{term}{one} {', '.join(places[:_MOST_SHOWN])}{more}, of {num_micro} in this step"


def _bad_samples(micro: LocalMicro) -> Iterator[int]:
    """Yield the samples with non-finite inputs; all of the microbatch if a tensor does not have one row per sample."""
    for tensor in tensor_leaves(micro.data):
        if tensor.is_floating_point() or tensor.is_complex():
            yield from _of(tensor, micro)


def _of(tensor: Tensor, micro: LocalMicro) -> Iterator[int]:
    finite: Any = torch.isfinite(tensor)
    if bool(finite.all()):
        return
    if tensor.dim() == 0 or tensor.shape[0] != len(micro.indices):
        yield from micro.indices
        return
    rows = finite.reshape(len(micro.indices), -1).all(dim=1).tolist()
    yield from (index for index, is_finite in zip(micro.indices, rows, strict=True) if not is_finite)
