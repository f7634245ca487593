"""Workers of parameter servers: which exits are reported, and what verify gives a late worker."""

import os

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from paceline.launch.agent import parameter_server_processes as served
from paceline.launch.agent.parameter_server_processes import RespawningWorkers
from paceline.verification.reference.parameter_server import wait_for_instruction


def child(*words: str) -> int:
    return os.spawnlp(os.P_NOWAIT, words[0], *words)


def said(monkeypatch: pytest.MonkeyPatch, servers: list[int]) -> list[str]:
    """Servers that end with these statuses beside two workers that would go on for ever."""
    monkeypatch.setattr(served, "_EXIT_SECONDS", 0.1)
    pids = {child("sh", "-c", f"exit {status}"): rank for rank, status in enumerate(servers)}
    workers = [child("sleep", "60"), child("sleep", "60")]
    pids |= {pid: len(servers) + number for number, pid in enumerate(workers)}
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if any(servers) and len(lines) == len(servers):  # as the one who hears of a failure does
            for pid in workers:
                os.kill(pid, 9)

    RespawningWorkers(
        pids, servers=len(servers), restart=lambda rank, start_number: pytest.fail("started again"), report=say
    ).wait()
    return sorted(lines)


def test_workers_that_are_ended_because_it_is_over_are_not_told_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, [0, 0]) == ["gone 0 0", "gone 1 0", "over 2 -9", "over 3 -9"]


def test_nobody_is_said_to_go_on_where_a_server_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, [1]) == ["gone 0 1", "gone 1 -9", "gone 2 -9"]


def test_a_worker_that_comes_late_to_a_verify_is_told_the_newest() -> None:
    store = HashStore()
    for number, what in enumerate(("float64", "job"), 1):
        store.set(f"paceline-verify/instruction/{number}", what)
    assert wait_for_instruction(store, last_number=0) == (2, "job")
    store.set("paceline-verify/instruction/3", "end")
    assert wait_for_instruction(store, last_number=2) == (3, "end")
