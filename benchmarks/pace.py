"""How quick the machine's cores are from moment to moment, to tell a machine whose speed moves from a forecast's error.

On a shared host a core's speed follows what its neighbours do. A process of its own multiplies two matrices every
quarter of a second, on the cores in turn (3 % of one core), and notes what that took of the processor's time, which
does not count what others on this machine do meanwhile. It knows nothing of forecasts and runs.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

_SIZE, _EVERY = 640, 0.25  # of the matrices; seconds
_FEWEST = 8  # looks that tell a pace


class Pace:
    """While entered, a process looks at the cores."""

    def __enter__(self) -> Self:
        self._file = tempfile.NamedTemporaryFile(prefix="pace-")
        self._process = subprocess.Popen([sys.executable, str(Path(__file__).resolve()), self._file.name])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        self._file.close()

    def of(self, since: float, until: float) -> float:
        """Seconds that one look took in the middle of those between two times (seconds since the epoch).

        Where they are fewer than eight, those around them count too.
        """
        lines = Path(self._file.name).read_text().splitlines()
        looks = [(float(at), float(took)) for at, took in (line.split() for line in lines)]
        own = [took for at, took in looks if since <= at <= until]
        if len(own) < _FEWEST:
            middle = (since + until) / 2
            own = [took for _, took in sorted(looks, key=lambda look: abs(look[0] - middle))[:_FEWEST]]
        return median(own)


def _look(path: str) -> None:
    import torch

    torch.set_num_threads(1)
    matrix, answer = torch.randn(_SIZE, _SIZE), torch.empty(_SIZE, _SIZE)
    cores = sorted(os.sched_getaffinity(0))
    parent, looks = os.getppid(), 0
    with Path(path).open("a") as file:
        while os.getppid() == parent:
            time.sleep(_EVERY)
            looks += 1
            os.sched_setaffinity(0, {cores[looks % len(cores)]})
            began = time.thread_time()
            torch.mm(matrix, matrix, out=answer)
            file.write(f"{time.time()} {time.thread_time() - began}\n")
            file.flush()


if __name__ == "__main__":
    _look(sys.argv[1])
