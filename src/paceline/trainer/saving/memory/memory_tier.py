"""Checkpoints in memory: newer than those on disk, and cheap, for a restart on the same machine.

They have the format of the checkpoints on disk, with all checksums, and count only if the files of all ranks are there.
They lie in a folder of /dev/shm that belongs to the command, or to the agent of each node, so they survive the ranks.
The command or agent removes the folder at its end.
"""

import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from paceline.data.loader import BatchLoader
from paceline.data.order.cursor import Cursor
from paceline.errors import CheckpointError
from paceline.events import Event, Note
from paceline.trainer.saving.checkpointer import Checkpointer
from paceline.trainer.saving.memory.rank_memory import RankMemory
from paceline.trainer.setup.build_training_setup import TrainingSetup

_MEASURED_STEPS = 10  # steps from which the duration of a step is measured before the first save
_MAX_SHARE = 0.01  # of the time of all steps, for saves at the derived interval
_FIRST_SECONDS, _BYTES_PER_SECOND = 0.05, 5e8  # an estimate of the cost of the first save, rather too high
_STATES_PER_PARAMETER = 3  # the parameter and two moments of Adam


class MemoryTier:
    """The memory checkpoints of one rank's run.

    Without an interval (`every`), the interval is derived so that saves take at most 1% of the time. Rank 0 measures
    the time, and all ranks learn the step of the next save from it.
    """

    def __init__(
        self,
        *,
        setup: TrainingSetup,
        checkpointer: Checkpointer,
        memory: RankMemory,
        every: int | None,
        start_step: int,
    ) -> None:
        self._checkpointer = checkpointer
        self._world = setup.world
        self._memory = memory
        self._every = every
        self._is_interval_estimated = False
        num_bytes = sum(member.parameter.numel() * member.parameter.element_size() for member in setup.named_parameters)
        self._estimated_seconds = _FIRST_SECONDS + num_bytes * _STATES_PER_PARAMETER / _BYTES_PER_SECOND
        self._interval_start = (start_step, time.perf_counter())
        self._interval = _MEASURED_STEPS if every is None else every
        self.next_step: float = 0
        """The step at which `save` is called next, the same on all ranks; infinite if a save has failed."""
        self.postpone(start_step)

    def postpone(self, step: int) -> None:
        """Leave out the save of this step, for example because it is saved on disk."""
        self.next_step = step + self._interval if self._every is None else (step // self._every + 1) * self._every

    def save(self, *, cursor: Cursor, loader: BatchLoader, progress: Mapping[str, Any]) -> list[Event]:
        """Save the current state. Every rank calls this at `next_step`.

        Without `every`, the first call saves nothing: it only derives the interval, from the time of the steps so far.
        A save that fails turns this tier off, and the run continues. Return a note about that.
        """
        if self._every is None and not self._is_interval_estimated:
            self._choose_next_step(cursor.step, seconds=self._estimated_seconds)
            self._is_interval_estimated = True
            return []
        start_time = time.perf_counter()
        try:
            write = partial(self._memory.write, step=cursor.step)
            self._checkpointer.write(write, cursor=cursor, loader=loader, progress=progress)
        except CheckpointError as error:
            self.next_step = math.inf
            text = f"checkpoints in memory are off: {error.what} A restart uses the newest checkpoint that is left"
            return [Note(text=text, level="warning")]
        if self._every is not None:
            self.postpone(cursor.step)
        else:
            # On a GPU, the threads of the memory folder take no time of the training.
            background_seconds = self._memory.background_seconds if self._world.device.type == "cpu" else 0.0
            self._choose_next_step(cursor.step, seconds=time.perf_counter() - start_time + background_seconds)
        return []

    def _choose_next_step(self, step: int, *, seconds: float) -> None:
        """Choose the step of the next save from its duration in `seconds` and the mean time of the last steps."""
        first_step, start_time = self._interval_start
        step_seconds = (time.perf_counter() - start_time) / max(1, step - first_step)
        num_steps = max(1, math.ceil(seconds / (_MAX_SHARE * max(step_seconds, 1e-6))))
        self._interval = int(self._world.share_json(num_steps))
        self.postpone(step)
        self._interval_start = (step, time.perf_counter())


def open_memory_tier(setup: TrainingSetup, checkpointer: Checkpointer, *, start_step: int) -> MemoryTier | None:
    """Return the memory tier of a run; None if it has no memory folder, or if `checkpoint.memory_every` is 0."""
    every, memory = setup.settings.checkpoint.memory_every, checkpointer.memory
    if memory is None or every == 0:
        return None
    return MemoryTier(setup=setup, checkpointer=checkpointer, memory=memory, every=every, start_step=start_step)
