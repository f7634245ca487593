"""Properties of a dataset that are needed before training, and comparison of the ranks' datasets."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.data.checksum import checksum
from paceline.data.fetch import WorkerError, all_checksums, tell_epoch, worker_error
from paceline.data.reader_process import read_apart
from paceline.data.sample_seeds import seed_sample
from paceline.data.source import Source
from paceline.data.stream.virtual_sharding import call_user_dataset
from paceline.errors import DesyncError, JobError
from paceline.torch_internals.rng import host_states, preserve_rng

Agree = Callable[[Any], list[Any]]


@dataclass(frozen=True, kw_only=True)
class DatasetProperties:
    """The length of a map-style dataset, and properties of its first and middle sample.

    `draws`: reading draws from the global random generators. `fingerprint` is a checksum of both samples. `problem` is
    the error, if one of them could not be read.
    """

    num_samples: int
    draws: bool = False
    fingerprint: int = 0
    problem: WorkerError | None = None

    def refuse_problem(self) -> None:
        """Raise an error if the data can't be read.

        Raises:
            JobError: with the user's line.
        """
        if self.problem is not None:
            raised = JobError(self.problem.what, where=self.problem.where, hint=self.problem.hint)
            raised.add_note(self.problem.full)
            raise raised


def find_facts(source: Source, *, seed: int) -> DatasetProperties:
    """Return the properties of the job's `train_data`, a map-style dataset.

    Raises:
        JobError: it is empty, or its length changes from call to call.
    """
    return read_apart(source, lambda: _find_properties(source.data, seed=seed), seed=seed)


def _find_properties(data: Any, *, seed: int) -> DatasetProperties:
    name = "train_data"
    total = find_length(data, name=name)
    draws_random, fingerprint, found_error = False, 0, None
    with preserve_rng():
        call_user_dataset(lambda: tell_epoch(data, 0), doing=f"set_epoch(0) of {name}")
        for index in looked_at(total):
            seed_sample(seed=seed, epoch=0, index=index)
            states_before = host_states()
            try:
                fingerprint = checksum(data[index], fingerprint)
            except Exception as error:
                hint = f"{name}[{index}] in a plain Python process shows the full error"
                found_error = worker_error(error, doing=f"reading sample {index} of {name}", hint=hint)
            draws_random = draws_random or found_error is not None or host_states() != states_before
            if found_error is not None:
                break
    find_length(data, name=name, before=total)
    return DatasetProperties(num_samples=total, draws=draws_random, fingerprint=fingerprint, problem=found_error)


def looked_at(num_samples: int) -> list[int]:
    """Return the indices of the samples that are read for the properties: the first and the middle one."""
    return list({0: 0, num_samples // 2: 0})


def find_length(data: Any, *, name: str, before: int | None = None) -> int:
    """Return `len(data)`.

    Raises:
        JobError: it is 0, or differs from `expected`.
    """
    total = call_user_dataset(lambda: len(data), doing=f"len() of {name}")
    if total == 0:
        raise JobError(f"{name} is empty.", where=type(data).__name__, hint="check the path it reads from")
    if before is not None and total != before:
        raise JobError(
            f"len() of {name} changes from call to call: {before:,} samples, then {total:,}.",
            where=type(data).__name__,
            cause="the order of samples is fixed for a whole epoch, and is the same on every rank",
            hint="a __len__ that stays the same, or a stream (an iterable without __len__)",
        )
    return int(total)


def refuse_other_data(
    lengths: Mapping[int, int],
    checksums: Mapping[int, int],
    *,
    samples: Sequence[int],
    name: str,
    is_same: Callable[[], bool],
) -> None:
    """Compare the ranks' data by length and checksum. All ranks with the same arguments raise the same error.

    `is_same` returns whether, on every rank, reading these samples again gives the same samples. If not, the dataset
    draws random numbers, and different samples do not mean different data.

    Raises:
        DesyncError: a rank has another length, or other samples.
    """
    first_rank = next(iter(lengths))
    different_rank = next((rank for rank, length in lengths.items() if length != lengths[first_rank]), None)
    if different_rank is not None:
        raise DesyncError(
            f"{name} has {lengths[different_rank]:,} samples on rank {different_rank} and "
            f"{lengths[first_rank]:,} on rank {first_rank}.",
            cause="each rank reads its own part, or different files",
            hint=_WHOLE_DATASET_HINT,
        )
    different_rank = next((rank for rank, value in checksums.items() if value != checksums[first_rank]), None)
    if different_rank is not None and is_same():
        shown = " or ".join(map(str, sorted(samples)))
        raise DesyncError(
            f"sample {shown} of {name} differs between rank {different_rank} and rank {first_rank}.",
            cause="the dataset is already split by rank, or its files are listed in a different order "
            "(an unsorted os.listdir)",
            hint=f"{_WHOLE_DATASET_HINT}; sorted(os.listdir(...))",
        )


def read_again(source: Source, *, samples: Sequence[int], epoch: int | None, seed: int) -> bool:
    """Return whether reading these samples twice gives the same samples."""

    def read_twice() -> bool:
        if epoch is not None:
            tell_epoch(source.data, epoch)
        return len({all_checksums(source.data, samples, epoch=epoch or 0, seed=seed) for _ in range(2)}) == 1

    return read_apart(source, read_twice, seed=seed)


def spread_checksums(
    source: Source, *, chosen: Sequence[int] | None, seed: int, most: int, seconds: float
) -> tuple[list[int], list[int]]:
    """Return indices of samples spread over the dataset, and the checksum of each.

    Without `fixed_indices`, choose at most `max_samples` at random, and stop reading after `seconds`.
    """

    def read_samples() -> tuple[list[int], list[int]]:
        start_time, total = time.monotonic(), len(source.data)
        indices = list(chosen or random.Random(seed).sample(range(total), min(total, most)))
        checksums: list[int] = []
        tell_epoch(source.data, 0)
        for index in indices:
            checksums.append(all_checksums(source.data, [index], epoch=0, seed=seed))
            if chosen is None and time.monotonic() - start_time > seconds:
                break
        return indices[: len(checksums)], checksums

    return read_apart(source, read_samples, seed=seed)


_WHOLE_DATASET_HINT = "is it already split by rank? give every rank the whole dataset: the run distributes the samples"
