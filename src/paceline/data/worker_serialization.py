"""Serialization of samples in the data worker itself.

A multiprocessing queue serializes in a background thread. An object that cannot be serialized is lost there, and the
rank waits for it forever. Therefore the worker itself serializes its samples, and the rank gets any error.
"""

import pickle
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

from paceline.data.fetch import WorkerError, worker_error
from paceline.errors import DataError
from paceline.launch.failures.oom_detection import explain_data_worker_error
from paceline.torch_internals.private_api import pin_memory


@dataclass(frozen=True, slots=True)
class SerializedMicrobatch:
    """A serialized microbatch; its tensors are sent as shared memory, as in any DataLoader."""

    content: bytes

    def pin_memory(self) -> "DeserializedMicrobatch":
        """Return the pinned content: torch's pin-memory thread calls this."""
        return DeserializedMicrobatch(pin_memory(deserialize(self.content)))


@dataclass(frozen=True, slots=True)
class DeserializedMicrobatch:
    """The content of a microbatch that torch's pin-memory thread has deserialized."""

    value: Any


def serialize_microbatch(value: Any) -> SerializedMicrobatch:
    """Serialize a microbatch in a data worker; if that fails, serialize the `WorkerError` instead."""
    try:
        return SerializedMicrobatch(bytes(ForkingPickler.dumps(value)))
    except Exception as error:
        return SerializedMicrobatch(bytes(ForkingPickler.dumps(serialization_error(error))))


def serialization_error(error: Exception) -> WorkerError:
    """Return the error for samples that a data worker cannot serialize."""
    return worker_error(error, doing="sending samples from a data worker to its rank", hint=_HINT)


def deserialize_microbatch(value: Any) -> Any:
    """Return the content of a microbatch that a data worker has serialized; return any other value unchanged.

    Raises:
        DataError: the content can't be rebuilt in this process.
        OSError, EOFError: the worker has died, and its shared memory no longer exists.
    """
    if isinstance(value, DeserializedMicrobatch):
        return value.value
    return deserialize(value.content) if isinstance(value, SerializedMicrobatch) else value


def deserialize(content: bytes) -> Any:
    """Return the object that another process has serialized.

    Raises:
        DataError: the object can't be rebuilt in this process.
        OSError, EOFError: the other process has died, and its shared memory no longer exists.
    """
    try:
        return pickle.loads(content)
    except (OSError, EOFError):
        raise
    except Exception as error:
        cause, hint = explain_data_worker_error(str(error)) or ("a class in it can be pickled but not unpickled", _HINT)
        raise DataError(
            f"the rank can't unpickle the samples that a data worker sent: {type(error).__name__}: {error}",
            cause=cause,
            hint=hint,
        ) from error


_HINT = "samples of tensors, numbers, strings, lists and dicts; or --data.workers 0, which sends nothing"
