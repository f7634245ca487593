"""Waiting for something that another thread or process does."""

import time
from collections.abc import Callable


def wait_until(is_done: Callable[[], bool], *, seconds: float = 60.0) -> None:
    """Wait until `is_done()`; an assertion fails if it takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        time.sleep(0.02)
