"""Report of a rank's memory by purpose when it runs out, as far as it can still be counted."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from paceline.errors import OutOfMemory
from paceline.launch.failures.oom_detection import (
    MemoryLimit,
    is_out_of_memory,
    out_of_memory,
    own_of,
    process_memory,
    release_freed_memory,
    tightest_room,
)
from paceline.profiling.model_tracing.memory_tracker import memory_at_rest
from paceline.trainer.setup.build_training_setup import TrainingSetup

_OF_PROCESS = ("VmRSS", "VmHWM", "VmSize", "VmData")


@dataclass(frozen=True, kw_only=True)
class MemoryBaseline:
    """The memory that the process used before the model was built, in each measure to which a limit applies."""

    used_bytes: Mapping[str, int]

    @classmethod
    def now(cls) -> "MemoryBaseline":
        """Return the current memory use of the process."""
        return cls(used_bytes={name: process_memory(name) for name in _OF_PROCESS})

    def built(self) -> "MemoryBaseline":
        """Return the baseline after building, with freed memory released, so that steps do not count the build."""
        release_freed_memory()
        return replace(self, used_bytes={**self.used_bytes, "VmHWM": process_memory("VmHWM")})

    def of(self, room: MemoryLimit | None) -> int:
        """Return the used bytes in the measure to which this limit applies."""
        name = "VmRSS" if room is None or not room.is_own else "VmSize" if "space" in room.name else "VmData"
        return self.used_bytes[name]


@contextmanager
def naming_memory(built: TrainingSetup | None, before: MemoryBaseline) -> Iterator[None]:
    """Convert an out-of-memory error into one that lists memory by purpose; without `setup`, of the build."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
            raise
        raise _told(error, built, before) from error


def _told(error: Exception, built: TrainingSetup | None, before: MemoryBaseline) -> OutOfMemory:
    if built is None:
        room = tightest_room()
        held = {"before its model": before.of(room), "building the model": max(0, own_of(room) - before.of(room))}
        return out_of_memory(error, part="building the model", held=held, room=room)
    shares = [member.parameter for member in built.named]
    found = memory_at_rest(model=built.model, optimizers=built.update.optimizers, shares=shares)
    own = {"parameters": found.parameters + found.buffers, "gradients": found.gradients, "optimizer": found.optimizer}
    if built.world.device.type == "cuda":
        return _on_gpu(error, own, built.world.device)
    room = tightest_room()
    first, now = before.of(room), own_of(room)
    held = {**own, "activations": max(0, now - first - sum(own.values())), "rest": first}
    if room is not None and not room.is_own:
        held["other processes"] = max(0, room.used_bytes - now)
    return out_of_memory(error, held=held, room=room)


def _on_gpu(error: Exception, own: Mapping[str, int], device: torch.device) -> OutOfMemory:
    """Return the error for a GPU. `rest` is what the allocator keeps in reserve, the context, and other processes."""
    free, total = torch.cuda.mem_get_info(device)
    given = torch.cuda.memory_allocated(device)
    held = {**own, "activations": max(0, given - sum(own.values())), "rest": max(0, total - free - given)}
    name = torch.cuda.get_device_name(device)
    return out_of_memory(error, held=held, room=MemoryLimit(name=name, limit_bytes=total, used_bytes=total - free))
