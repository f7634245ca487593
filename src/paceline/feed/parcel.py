"""What a data worker sends, serialized by the worker itself.

A multiprocessing queue serializes in a thread. An object that cannot be serialized is dropped there, and the rank waits
for it forever. Here the worker serializes what it read, so that an error reaches the rank like any other.
"""

import pickle
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

from paceline.errors import DataError
from paceline.feed.fetch import Trouble, trouble
from paceline.survive.short import explain_lack
from paceline.torch_private import pin_memory


@dataclass(frozen=True, slots=True)
class Parcel:
    """A serialized microbatch; tensors in it travel as shared memory, as in any DataLoader."""

    content: bytes
    is_pinned: bool = False

    def pin_memory(self) -> "Opened":
        """Return the pinned content: torch's thread that pins calls this."""
        return Opened(pin_memory(load(self.content)))


@dataclass(frozen=True, slots=True)
class Opened:
    """What was in a parcel that torch's thread has opened."""

    value: Any


def pack(value: Any) -> Parcel:
    """Serialize a microbatch in a data worker; where that fails, the parcel holds the `Trouble`."""
    try:
        return Parcel(bytes(ForkingPickler.dumps(value)))
    except Exception as error:
        return Parcel(bytes(ForkingPickler.dumps(not_sent(error))))


def not_sent(error: Exception) -> Trouble:
    """Say why what was read cannot leave the data worker."""
    return trouble(error, doing="sending samples from a data worker to its rank", hint=_HINT)


def unpack(parcel: Any) -> Any:
    """Return what a data worker has packed.

    Raises:
        DataError: it cannot be made again in this process.
        OSError, EOFError: the worker is gone, and its shared memory with it.
    """
    if isinstance(parcel, Opened):
        return parcel.value
    return load(parcel.content) if isinstance(parcel, Parcel) else parcel


def load(content: bytes) -> Any:
    """Return what another process has serialized.

    Raises:
        DataError: it cannot be made again in this process.
        OSError, EOFError: the other process is gone, and its shared memory with it.
    """
    try:
        return pickle.loads(content)
    except (OSError, EOFError):
        raise
    except Exception as error:
        cause, hint = explain_lack(str(error)) or ("a class in it can be pickled but not unpickled", _HINT)
        raise DataError(
            f"what a data worker sent cannot be made again in the rank: {type(error).__name__}: {error}",
            cause=cause,
            hint=hint,
        ) from error


_HINT = "samples of tensors, numbers, strings, lists and dicts; or --data.workers 0, which sends nothing"
