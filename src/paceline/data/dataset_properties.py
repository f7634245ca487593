"""Properties of a dataset that are needed before training, and comparison of the ranks' datasets."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.data.checksum import checksum
from paceline.data.fetch import WorkerError, checksum_of_samples, set_dataset_epoch, worker_error
from paceline.data.reader_process import read_in_process
from paceline.data.sample_seeds import seed_sample
from paceline.data.source import Source
from paceline.data.stream.virtual_sharding import call_user_dataset
from paceline.errors import DesyncError, JobError
from paceline.torch_internals.rng import cpu_rng_states, preserve_rng


@dataclass(frozen=True, kw_only=True)
class DatasetProperties:
    """The length of a map-style dataset, and properties of its first and middle sample.

    `draws_random` is True if reading one of them draws from the global random generators or fails. `fingerprint` is a
    checksum of both samples. `error` is set if one of them could not be read.
    """

    num_samples: int
    draws_random: bool = False
    fingerprint: int = 0
    error: WorkerError | None = None

    def raise_error(self) -> None:
        """Raise the stored error, if there is one.

        Raises:
            JobError: a sample could not be read; the message names the line of the user's code.
        """
        if self.error is not None:
            job_error = JobError(self.error.what, where=self.error.where, hint=self.error.hint)
            job_error.add_note(self.error.traceback_text)
            raise job_error


def find_properties(source: Source, *, seed: int) -> DatasetProperties:
    """Return the properties of the job's `train_data`, a map-style dataset.

    Raises:
        JobError: the dataset is empty, or its length changes from call to call.
    """
    return read_in_process(source, lambda: _find_properties(source.data, seed=seed), seed=seed)


def _find_properties(data: Any, *, seed: int) -> DatasetProperties:
    name = "train_data"
    total = read_length(data, name=name)
    draws_random, fingerprint, sample_error = False, 0, None
    with preserve_rng():
        call_user_dataset(lambda: set_dataset_epoch(data, 0), doing=f"set_epoch(0) of {name}")
        for index in property_samples(total):
            seed_sample(seed=seed, epoch=0, index=index)
            states_before = cpu_rng_states()
            try:
                fingerprint = checksum(data[index], fingerprint)
            except Exception as error:
                hint = f"{name}[{index}] in a plain Python process shows the full error"
                sample_error = worker_error(error, doing=f"reading sample {index} of {name}", hint=hint)
            draws_random = draws_random or sample_error is not None or cpu_rng_states() != states_before
            if sample_error is not None:
                break
    read_length(data, name=name, expected=total)
    return DatasetProperties(num_samples=total, draws_random=draws_random, fingerprint=fingerprint, error=sample_error)


def property_samples(num_samples: int) -> list[int]:
    """Return the indices of the samples that are read for the properties: the first and the middle one."""
    return list(dict.fromkeys([0, num_samples // 2]))


def read_length(data: Any, *, name: str, expected: int | None = None) -> int:
    """Return `len(data)`.

    Raises:
        JobError: the length is 0, or differs from `expected`.
    """
    total = call_user_dataset(lambda: len(data), doing=f"len() of {name}")
    if total == 0:
        raise JobError(f"{name} is empty.", where=type(data).__name__, hint="check the path it reads from")
    if expected is not None and total != expected:
        raise JobError(
            f"len() of {name} changes from call to call: {expected:,} samples, then {total:,}.",
            where=type(data).__name__,
            cause="the order of samples is fixed for a whole epoch, and is the same on every rank",
            hint="a __len__ that stays the same, or a stream (an iterable without __len__)",
        )
    return int(total)


def refuse_different_data(
    lengths: Mapping[int, int],
    checksums: Mapping[int, int],
    *,
    samples: Sequence[int],
    name: str,
    is_repeatable: Callable[[], bool],
) -> None:
    """Compare the ranks' data by length and checksum. All ranks with the same arguments raise the same error.

    `lengths` and `checksums` map each rank to the length of its dataset and to the checksum of its `samples`.
    `is_repeatable` returns whether, on every rank, reading `samples` twice gives the same result. If it returns False,
    the dataset draws random numbers, and different checksums are no error.

    Raises:
        DesyncError: the ranks' lengths or samples differ.
    """
    first_rank = next(iter(lengths))
    different_rank = next((rank for rank, length in lengths.items() if length != lengths[first_rank]), None)
    if different_rank is not None:
        raise DesyncError(
            f"{name} has {lengths[different_rank]:,} samples on rank {different_rank} and "
            f"{lengths[first_rank]:,} on rank {first_rank}.",
            cause="the dataset is already split by rank, or the ranks read different files",
            hint=_WHOLE_DATASET_HINT,
        )
    different_rank = next((rank for rank, value in checksums.items() if value != checksums[first_rank]), None)
    if different_rank is not None and is_repeatable():
        sample_list = " or ".join(map(str, sorted(samples)))
        raise DesyncError(
            f"sample {sample_list} of {name} differs between rank {different_rank} and rank {first_rank}.",
            cause="the dataset is already split by rank, or its files are listed in a different order "
            "(an unsorted os.listdir)",
            hint=f"{_WHOLE_DATASET_HINT}; sorted(os.listdir(...))",
        )


def is_repeatable_read(source: Source, *, samples: Sequence[int], epoch: int | None, seed: int) -> bool:
    """Return whether reading `samples` twice gives the same result. If `epoch` is None, `set_epoch` is not called."""

    def read_twice() -> bool:
        if epoch is not None:
            set_dataset_epoch(source.data, epoch)
        return len({checksum_of_samples(source.data, samples, epoch=epoch or 0, seed=seed) for _ in range(2)}) == 1

    return read_in_process(source, read_twice, seed=seed)


def sample_checksums(
    source: Source, *, fixed_indices: Sequence[int] | None, seed: int, max_samples: int, seconds: float
) -> tuple[list[int], list[int]]:
    """Return sample indices, and the checksum of each sample.

    The indices are `fixed_indices`. If None, they are at most `max_samples` random ones, and no sample is read after
    `seconds`.
    """

    def read_samples() -> tuple[list[int], list[int]]:
        start_time, total = time.monotonic(), len(source.data)
        indices = list(fixed_indices or random.Random(seed).sample(range(total), min(total, max_samples)))
        checksums: list[int] = []
        set_dataset_epoch(source.data, 0)
        for index in indices:
            checksums.append(checksum_of_samples(source.data, [index], epoch=0, seed=seed))
            if fixed_indices is None and time.monotonic() - start_time > seconds:
                break
        return indices[: len(checksums)], checksums

    return read_in_process(source, read_samples, seed=seed)


_WHOLE_DATASET_HINT = "give every rank the whole dataset, because the run distributes the samples"
