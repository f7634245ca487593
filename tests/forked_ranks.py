"""Ranks as processes that share their imports: `python -m tests.forked_ranks FOLDER RANKS MODULE WORDS...`.

The module is imported once, with torch; each rank is forked, has `RANK` and `LOCAL_RANK` in its environment and calls
the module's `main`, then ends as any Python does.
"""

import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_forked(
    module: str, words: Sequence[str], *, ranks: int, folder: Path, environ: Mapping[str, str], timeout: float
) -> list[str]:
    """Return what each rank printed; all must end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    environ = {**os.environ, **environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **sizes}
    command = [sys.executable, "-W", "ignore", "-m", "tests.forked_ranks", str(folder), str(ranks), module, *words]
    with subprocess.Popen(command, cwd=ROOT, env=environ, start_new_session=True) as process:
        try:
            code = process.wait(timeout=timeout)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    said = [(folder / f"rank-{rank}.err").read_text()[-3000:] for rank in range(ranks)]
    assert code == 0, "\n".join(said)
    return [(folder / f"rank-{rank}.out").read_text() for rank in range(ranks)]


def main(folder: Path, ranks: int, module: str, words: Sequence[str]) -> int:
    """Fork the ranks and wait; the exit code of one that failed. A rank returns from here too."""
    sys.argv = [module, *words]
    entry = importlib.import_module(module).main
    started = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            for name, number in (("out", 1), ("err", 2)):
                with (folder / f"rank-{rank}.{name}").open("wb") as file:
                    os.dup2(file.fileno(), number)
            entry()
            return 0
        started.append(pid)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in started)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
