"""Process exit: joins the job's threads, runs its exit functions and closes its files, as Python itself would.

Python's own shutdown would also destroy torch's objects. This takes a second, and the destructor of a process group may
wait for a peer that has exited. So only the job's resources are closed, and then the process exits.
"""

import atexit
import faulthandler
import gc
import io
import os
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

from paceline.console.output import flush
from paceline.user_code import is_user_file

LIMIT_SECONDS = 60.0
_NOTICE_SECONDS = 5.0
_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


class RunFinish:
    """The exit code of the `pl.Run` that finished last in this process; None if no run has finished."""

    code: int | None = None


run_finish = RunFinish()


def end_python(code: int, *, limit_seconds: float | None = LIMIT_SECONDS) -> NoReturn:
    """Join threads, run exit functions, close the job's files, and exit with `code`.

    After `limit_seconds`, the process writes the stack of each thread to standard error and exits anyway.
    """
    if limit_seconds is not None:
        threading.Thread(target=_force_exit, args=(code, limit_seconds), daemon=True).start()
    threading._shutdown()  # type: ignore[attr-defined]  # multiprocessing does the same
    atexit._run_exitfuncs()
    _drop_user_modules()
    with suppress(Exception):
        gc.collect()
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """Exit at once, after flushing the files that the job still has open."""
    for candidate in gc.get_objects():
        if type(candidate) in _WRITERS:
            with suppress(Exception):
                candidate.flush()
    flush()
    os._exit(code)


def _force_exit(code: int, limit_seconds: float) -> None:
    time.sleep(min(_NOTICE_SECONDS, limit_seconds / 2))
    remaining = limit_seconds - min(_NOTICE_SECONDS, limit_seconds / 2)
    own_threads = (threading.current_thread(), threading.main_thread())
    names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread not in own_threads]
    description = (
        f"threads of the job that are still running: {', '.join(names[:8])}" if names else "exit functions of the job"
    )
    with suppress(Exception):
        print(
            f"training is done and saved; waiting at most {remaining:.0f} s for {description}",
            file=sys.stderr,
            flush=True,
        )
    time.sleep(remaining)
    with suppress(Exception):
        print(
            f"the job did not exit within {limit_seconds:.0f} s and is ended here, with these stacks:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(file=sys.stderr)
    os._exit(code)


def _drop_user_modules() -> None:
    """Drop the job's modules from `sys.modules`, so that files they left open are closed, as when any program ends."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and is_user_file(file):
            sys.modules.pop(name, None)
