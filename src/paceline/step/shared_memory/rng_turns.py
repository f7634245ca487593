"""Replicas in one process take turns to draw random numbers, because they share the host's random generators.

The generators are seeded for one microbatch, whose forward then draws from them. If two replicas ran at the same time,
they would draw from each other's stream. The first step runs all forwards and backwards one at a time. It detects
whether forwards draw, and once a forward has drawn, whether backwards draw too, as with activation checkpointing. In
later steps, forwards take turns only if forwards draw, and backwards only if backwards draw. A backward that draws
starts from the generator state at the end of its own replica's forward, even if another replica ran in between. With
one replica per process, this holds without turns.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

import torch

from paceline.errors import RunError
from paceline.torch_internals.dispatch_modes import RandomOpDetector
from paceline.torch_internals.rng import cpu_rng_states, get_rng_states, set_rng_states


class HostRandomness(Enum):
    """The passes that draw random numbers on the host; BACKWARD means forwards and backwards."""

    UNKNOWN = auto()
    NONE = auto()
    FORWARD = auto()
    BACKWARD = auto()


class HostRngTurns:
    """The turns of the replicas of one process. `gpu` is the GPU that several replicas share, or None."""

    def __init__(self, *, timeout_seconds: float, gpu: torch.device | None = None) -> None:
        self.host_randomness = HostRandomness.UNKNOWN
        self._timeout = timeout_seconds
        self._gpu = gpu
        self._lock = threading.Lock()
        self._has_drawn = {"forward": False, "backward": False}
        self._thread_local = threading.local()

    def states(self) -> tuple[object, ...]:
        """Return the states of the shared generators."""
        return (*cpu_rng_states(), None if self._gpu is None else torch.cuda.get_rng_state(self._gpu).numpy().tobytes())

    @contextmanager
    def forward_context(self, seed: Callable[[], None]) -> Iterator[None]:
        """Return a context for a forward and its loss. On entry, it waits for a turn if needed, and calls `seed()`."""
        if self.host_randomness is HostRandomness.NONE:
            seed()
            yield
            return
        with self._take_turn():
            seed()
            states_before = self.states() if self.host_randomness is HostRandomness.UNKNOWN else None
            yield
            if states_before is not None and self.states() != states_before:
                self._has_drawn["forward"] = True
            self._thread_local.forward_end_states = (
                get_rng_states(self._gpu) if self.host_randomness is not HostRandomness.FORWARD else None
            )

    @contextmanager
    def backward_context(self) -> Iterator[None]:
        """Return a context for a backward. On entry, it waits for a turn if needed.

        Activation checkpointing restores the generators after it draws. So draws are detected by operation, not by a
        comparison of generator states.
        """
        if self.host_randomness in (HostRandomness.NONE, HostRandomness.FORWARD):
            yield
            return
        with self._take_turn():
            end_states = getattr(self._thread_local, "forward_end_states", None)
            if end_states is not None:
                set_rng_states(end_states, self._gpu)
            if self.host_randomness is HostRandomness.BACKWARD or not self._has_drawn["forward"]:
                yield
                return
            with RandomOpDetector() as detector:
                yield
            self._has_drawn["backward"] = self._has_drawn["backward"] or detector.has_random_op

    @contextmanager
    def _take_turn(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=self._timeout):
            raise RunError(
                f"the forward or backward of another replica did not end within {self._timeout:g} s.",
                cause="a thread is stuck in the model, the loss or a lock that another thread holds",
                hint="--layout ddp, where each replica is a process of its own",
            )
        try:
            yield
        finally:
            self._lock.release()

    def record_draws(self) -> None:
        """Set `host_randomness`, if it is unknown, from the draws that were detected in the step."""
        if self.host_randomness is HostRandomness.UNKNOWN:
            has_drawn = self._has_drawn
            self.host_randomness = (
                HostRandomness.BACKWARD
                if has_drawn["backward"]
                else HostRandomness.FORWARD
                if has_drawn["forward"]
                else HostRandomness.NONE
            )

    def reset_draws(self) -> None:
        """Forget the detected draws, because a pass drew unexpectedly. The caller then repeats the step."""
        self.host_randomness = HostRandomness.UNKNOWN
