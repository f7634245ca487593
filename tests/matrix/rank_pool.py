"""Processes that join one world and run many cases; a case that fails or hangs takes only itself along."""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from paceline.comm.process_group import World
from tests.matrix.matrix_cases import Case
from tests.matrix.matrix_worker import join, work

_GRACE_SECONDS = 5.0
_FORK = multiprocessing.get_context("fork")  # torch and transformers are imported once, by the one that forks


def work_case(value: dict[str, Any], world: World) -> dict[str, Any]:
    """A case of the matrix."""
    return work(Case.from_json(value), world)


class Pool:
    """One world of `ranks` processes; each does `do` with what `ask` and `run` send."""

    def __init__(
        self, *, ranks: int, log: Path, do: Callable[[dict[str, Any], World], dict[str, Any]] = work_case
    ) -> None:
        self.ranks = ranks
        self.is_fresh = True
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(ranks):
            here, there = _FORK.Pipe()
            process = _FORK.Process(target=_serve, args=(there, rank, ranks, port, log, do), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, case: Case, *, seconds: float) -> dict[str, Any]:
        """One answer for all ranks; `hung` where some of them gave none. After anything but `done` start anew."""
        return self.ask(case.as_json(), seconds=seconds)

    def ask(self, value: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        """The same of anything that is JSON."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(json.dumps(value).encode())
        answers = self._answers(seconds)
        self.is_fresh = False
        return _joined(answers, ranks=self.ranks, seconds=seconds)

    def _answers(self, seconds: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        open_pipes: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        until = time.monotonic() + seconds
        while open_pipes and time.monotonic() < until:
            for pipe in wait(list(open_pipes), timeout=max(0.0, until - time.monotonic())):
                rank = open_pipes.pop(pipe)
                try:
                    found.append(json.loads(pipe.recv_bytes()))  # type: ignore[union-attr]
                except (EOFError, OSError):
                    found.append({"state": "failed", "why": "the process died", "at": time.monotonic(), "rank": rank})
            if any(answer["state"] != "done" for answer in found):
                until = min(until, time.monotonic() + _GRACE_SECONDS)
        return found

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        for pipe in self._pipes:
            pipe.close()


def run_all(
    cases: Sequence[Case], *, log: Path, seconds: float = 120.0, tell: Callable[[dict[str, Any]], None] | None = None
) -> list[dict[str, Any]]:
    """Answers in the cases' order. What fails in a pool that others have used is tried once more in a fresh one."""
    found: list[dict[str, Any]] = []
    pool: Pool | None = None
    for case in cases:
        if pool is None or pool.ranks != case.processes:
            if pool is not None:
                pool.close()
            pool = Pool(ranks=case.processes, log=log)
        began, was_fresh = time.monotonic(), pool.is_fresh
        answer = pool.run(case, seconds=seconds)
        if answer["state"] in ("failed", "hung"):
            pool.close()
            pool = Pool(ranks=case.processes, log=log)
            if not was_fresh:
                answer = pool.run(case, seconds=seconds)
                if answer["state"] in ("failed", "hung"):
                    pool.close()
                    pool = None
        answer = {**case.as_json(), **answer, "asked": case.layout, "seconds": round(time.monotonic() - began, 2)}
        found.append(answer)
        if tell is not None:
            tell(answer)
    if pool is not None:
        pool.close()
    return found


def _joined(answers: list[dict[str, Any]], *, ranks: int, seconds: float) -> dict[str, Any]:
    if answers and len(answers) == ranks and all(answer["state"] == "done" for answer in answers):
        first = min(answers, key=lambda answer: int(answer["rank"]))
        for name in ("start", "final"):
            if len({answer.get(name) for answer in answers}) > 1:
                return {"state": "failed", "why": f"the ranks have different digests of the {name} weights"}
        return {**first, "state": first["verdict"]}
    wrong = [answer for answer in answers if answer["state"] != "done"]
    if not wrong:
        return {"state": "hung", "why": f"{ranks - len(answers)} of {ranks} ranks gave no answer in {seconds:.0f} s"}
    first = min(wrong, key=lambda answer: float(answer["at"]))
    alike = len(wrong) == ranks and len({answer["why"] for answer in wrong}) == 1
    if first["state"] == "refused" and not alike:
        missing = ranks - len(answers)
        why = f"refused on {len(wrong)} of {ranks} ranks only, {missing} hung: {first['why']}"
        return {**first, "state": "failed", "why": why}
    return first


def _serve(
    pipe: Connection,
    rank: int,
    ranks: int,
    port: int,
    log: Path,
    do: Callable[[dict[str, Any], World], dict[str, Any]],
) -> None:
    log.mkdir(parents=True, exist_ok=True)
    with (log / f"rank-{ranks}-{rank}.log").open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
        world = join(rank, ranks=ranks, port=port, timeout_seconds=100)
        while True:
            try:
                value = json.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)
            answer = do(value, world)
            if "text" in answer:
                print(value, answer["text"], sep="\n", flush=True)
            pipe.send_bytes(json.dumps(answer).encode())
