"""The fetcher, which reads samples by index and collates them to a microbatch, in the rank or in a data worker."""

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from traceback import format_exception
from types import FrameType
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate
from typing_extensions import override

from paceline.data.checksum import checksum
from paceline.data.sample_seeds import seed_sample
from paceline.data.source import Source
from paceline.data.types import DatasetSummary
from paceline.errors import DataError, shorten_text, user_line
from paceline.launch.agent.signals import STOP_SIGNALS, die_with_parent
from paceline.launch.failures.oom_detection import explain_data_worker_error
from paceline.torch_internals.private_api import set_worker_dataset
from paceline.torch_internals.rng import preserve_rng, seed_all, stream_key

_MAX_TEXT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class MicrobatchRequest:
    """A request for one microbatch, or, with a `check`, for a `DatasetSummary` at the start of an epoch.

    If `epoch` is None, as in an evaluation, `set_epoch` is not called.
    """

    epoch: int | None
    indices: tuple[int, ...]
    check: "SampleCheckRequest | None" = None


@dataclass(frozen=True, kw_only=True)
class SampleCheckRequest:
    """The samples to check at the start of an epoch; none if only the length is checked."""

    samples: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WorkerError:
    """An exception in a data worker as text, because the exception itself may not be picklable.

    `what`, `where`, `hint` and `cause` are for the screen; `traceback_text` is for the rank's log.
    """

    what: str
    where: str
    hint: str = ""
    cause: str = ""
    traceback_text: str = field(default="", repr=False)


class Fetcher(Dataset[Any]):
    """A dataset that is indexed by `MicrobatchRequest` and returns collated microbatches.

    For a request with a `check`, it returns a `DatasetSummary`. For a request with neither a `check` nor indices, it
    returns None. If the user's code raises an exception, it returns a `WorkerError`.
    """

    def __init__(self, *, data: Any, collate: Callable[[list[Any]], Any] | None, seed: int, seed_samples: bool) -> None:
        self._data = data
        self._collate = collate or default_collate
        self._seed = seed
        self._seed_samples = seed_samples
        self._has_called_len = False
        self._epoch: int | None = None

    @override
    def __getitem__(self, request: MicrobatchRequest) -> Any:
        try:
            self._set_epoch(request.epoch)
            if request.check is not None:
                return self._summarize(request.epoch or 0, request.check.samples)
        except Exception as error:
            return worker_error(error, doing=f"reading the data of epoch {request.epoch}")
        if not request.indices:
            return None
        samples: list[Any] = []
        try:
            self._read_samples(request, samples)
        except Exception as error:
            return worker_error(error, doing=f"reading sample {request.indices[len(samples)]}")
        try:
            return self._collate(samples)
        except Exception as error:
            return worker_error(
                error,
                doing=f"collating samples {_list_indices(request.indices)} of shapes {_describe_shapes(samples)}",
                hint="collate=lambda samples: ... to pad or stack them",
            )

    def _set_epoch(self, epoch: int | None) -> None:
        """Call `set_epoch` of the dataset if the epoch is a new one.

        The first time, call `len()` before it, as a DataLoader does: some datasets load their index in `__len__`.
        """
        if not self._has_called_len:
            self._has_called_len = True
            len(self._data)
        if epoch is not None and epoch != self._epoch:
            self._epoch = epoch
            set_dataset_epoch(self._data, epoch)

    def _summarize(self, epoch: int, samples: tuple[int, ...]) -> DatasetSummary:
        total = len(self._data)
        if max(samples, default=0) >= total:
            return DatasetSummary(num_samples=total)
        value = checksum_of_samples(self._data, samples, epoch=epoch, seed=self._seed)
        return DatasetSummary(num_samples=total, samples=samples, checksum=value)

    def _read_samples(self, request: MicrobatchRequest, samples: list[Any]) -> None:
        """Append the samples to `samples`, whose length after an exception shows which sample failed."""
        epoch = request.epoch or 0
        if not self._seed_samples:
            seed_all(stream_key(self._seed, "microbatch", epoch, request.indices[0]))
        for index in request.indices:
            if self._seed_samples:
                seed_sample(seed=self._seed, epoch=epoch, index=index)
            samples.append(self._data[index])


def checksum_of_samples(data: Any, samples: Sequence[int], *, epoch: int, seed: int) -> int:
    """Return one checksum over these samples, each read with its own seed; 0 if a sample can't be read."""
    value = 0
    with preserve_rng():
        for index in samples:
            seed_sample(seed=seed, epoch=epoch, index=index)
            try:
                value = checksum(data[index], value)
            except Exception:  # the error is reported when a microbatch needs this sample
                return 0
    return value


def worker_error(error: Exception, *, doing: str, hint: str = "") -> WorkerError:
    """Return the exception as text, with the line of the user's code that raised it."""
    line = user_line(error)
    where = f"{line}: {line.text}" if line else ""
    message = shorten_text(str(error))
    cause, hint = explain_data_worker_error(message) or ("", hint)
    return WorkerError(
        what=f"{doing} failed: {type(error).__name__}: {message}", where=where, cause=cause, hint=hint,
        traceback_text=_format_traceback(error),
    )  # fmt: skip


def _format_traceback(error: Exception) -> str:
    """Return the traceback as text, at most 1 MiB; an empty string if it can't be formatted."""
    try:
        return "".join(format_exception(error))[:_MAX_TEXT_BYTES]
    except Exception:  # some exceptions can't be printed
        return ""


def raise_worker_error(value: Any) -> Any:
    """Return the value, or raise the error if it is a `WorkerError`.

    Raises:
        DataError: the dataset or the collate function raised an exception.
    """
    if isinstance(value, WorkerError):
        data_error = DataError(value.what, where=value.where, cause=value.cause, hint=value.hint)
        if value.traceback_text:
            data_error.add_note(value.traceback_text)
        raise data_error
    return value


def start_function(source: Source, *, user_code_sees_one_worker: bool, parent: int) -> Callable[[int], None]:
    """Return the function that a data worker runs first.

    It makes the worker ignore signals and die with its `parent`, and then calls the user's `worker_init_fn`. With
    `user_code_sees_one_worker`, `get_worker_info()` reports a single worker, however many there are.
    """
    user_init = source.loader.worker_init_fn if source.loader is not None else None

    def start(worker: int) -> None:
        follow_rank(parent)
        torch.set_num_threads(1)
        set_worker_dataset(source.data, is_only_worker=user_code_sees_one_worker)
        if user_init is not None:
            user_init(worker)

    return start


def follow_rank(parent: int) -> None:
    """Make this process ignore stop signals and die with its parent.

    It installs a handler instead of SIG_IGN, because programs that the dataset starts would inherit SIG_IGN.
    """
    die_with_parent(parent)
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, _ignore_signal)


def set_dataset_epoch(data: Any, epoch: int) -> None:
    """Call `set_epoch(epoch)` on a dataset or, if it is a wrapper without this method, on the datasets that it wraps.

    Wrappers such as torch's `Subset` and `ConcatDataset` store the wrapped datasets in `dataset` or `datasets`.
    """
    remaining, visited = [data], set[int]()
    while remaining:
        dataset = remaining.pop()
        if id(dataset) in visited:
            continue
        visited.add(id(dataset))
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
            continue
        attributes = getattr(dataset, "__dict__", {})
        inner = attributes.get("datasets", ())
        remaining += [attributes["dataset"]] if "dataset" in attributes else []
        remaining += inner.values() if isinstance(inner, Mapping) else inner if isinstance(inner, tuple | list) else ()


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """Ignore a signal, since the rank handles it."""


def _list_indices(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:4])) + (", ..." if len(indices) > 4 else "")


def _describe_shapes(samples: Sequence[Any]) -> str:
    shapes = [_describe_shape(sample) for sample in samples]
    return " and ".join(list(dict.fromkeys(shapes))[:3])


def _describe_shape(sample: Any) -> str:
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{name}: {_describe_shape(value)}" for name, value in sample.items()) + "}"
    if isinstance(sample, tuple | list):
        return "(" + ", ".join(_describe_shape(part) for part in sample) + ")"
    shape = getattr(sample, "shape", None)
    return str(tuple(shape)) if shape is not None else type(sample).__name__
