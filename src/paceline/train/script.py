"""The script that a `pl.Run` is in: how it was started, and how it is started again."""

import shlex
import sys
from pathlib import Path

from paceline.launch.environments import Joined


def script_again(joined: Joined | None, *, folder: Path | None) -> str:
    """The script's own command line; with `folder`, what to write into it so that it goes on there."""
    words = list(sys.orig_argv)
    if joined is not None and joined.kind == "torchrun":
        words = [word for word in words[1:] if word != "-u"]  # which torchrun has put there
    line = shlex.join([*(joined.launcher if joined is not None else []), *words])
    return line if folder is None else f"{line}, with pl.Run(..., run_dir={str(folder)!r})"
