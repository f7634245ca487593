"""The entry point `torchrun.handlers`: every torchrun of this installation imports it, and learns of the backend.

So this module imports little. It changes one thing if torchrun runs a command of Paceline, or uses the backend: the
summary of a failure is printed without torchrun's own traceback around it.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

from paceline.errors import PacelineError
from paceline.plugins import resolve

_EXPECTED_ERRORS = ("ChildFailedError", "SignalException")
_LAUNCHERS = ("torchrun", "/torch/distributed/run.py")


def rendezvous_creator() -> Callable[[Any], Any]:
    """Return the function that creates the rendezvous of this backend, as torch asks for it."""
    if is_paceline_command(sys.argv):
        shorten_summary()
    return _create_rendezvous


def _create_rendezvous(parameters: Any) -> Any:
    shorten_summary()
    return resolve("paceline.launch.torchrun.local_rendezvous:create_rendezvous")(parameters)


def is_paceline_command(arguments: Sequence[str]) -> bool:
    """Return whether these are the arguments of a torchrun that runs `-m paceline`."""
    if not arguments or not arguments[0].endswith(_LAUNCHERS):
        return False
    return any(pair in (("-m", "paceline"), ("--module", "paceline")) for pair in pairwise(arguments))


def shorten_summary() -> None:
    """Install an excepthook that prints torchrun's summary of a failure, or of a signal, without torchrun's frames."""
    previous_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if kind.__name__ in _EXPECTED_ERRORS:
            print(error, file=sys.stderr, flush=True)
        elif isinstance(error, PacelineError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            previous_hook(kind, error, trace)

    sys.excepthook = hook
