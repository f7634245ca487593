"""A machine on which ranks can't reach each other is named before any rank starts."""

import errno
import os
import socket
import subprocess
from typing import Any

import pytest

from paceline.comm import process_group
from paceline.comm.process_group import LaunchInfo, World
from paceline.errors import MachineError
from paceline.launch.launcher import LaunchRequest, start
from paceline.launch.rendezvous import listen_on_free_port
from paceline.run_folder.run_folder import RunFolder
from tests.conftest import Shop

IS_DOWN = "true"
HAS_NO_IPV4 = "ip link set lo up && ip addr del 127.0.0.1/8 dev lo"


def refuse(number: int) -> Any:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refused


@pytest.mark.parametrize(
    ("method", "number", "cause", "hint"),
    [
        ("connect", errno.ENETUNREACH, "is the loopback interface up?", "ip link set lo up"),
        ("connect", errno.ETIMEDOUT, "is the loopback interface up?", "ip link set lo up"),
        ("bind", errno.EADDRNOTAVAIL, "no IPv4 address", "ip addr add 127.0.0.1/8 dev lo"),
        ("bind", errno.EMFILE, "files here (`ulimit -n`)", "ulimit -n 4096"),
    ],
)
def test_a_loopback_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, method: str, number: int, cause: str, hint: str
) -> None:
    monkeypatch.setattr(socket.socket, method, refuse(number), raising=False)
    with pytest.raises(MachineError, match=r"127\.0\.0\.1 can't be reached") as caught:
        listen_on_free_port()
    assert cause in caught.value.cause and hint in caught.value.hint


def test_a_loopback_that_works_is_listened_on() -> None:
    with listen_on_free_port() as listener, socket.create_connection(listener.getsockname(), timeout=30):
        assert listener.get_inheritable()


def test_the_launcher_asks_before_it_starts_anything(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", refuse(errno.ENETUNREACH), raising=False)
    with pytest.raises(MachineError, match="can't be reached"):
        start(LaunchRequest(ranks=2, run=RunFolder(tmp_path / "run"), entry="nowhere:main"))
    assert not (tmp_path / "run").exists()


def without_loopback(shop: Shop, setup: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a network namespace of its own; skip the test where the system allows none."""
    if subprocess.run(["unshare", "-n", "sh", "-c", setup], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be created here")
    command = ["unshare", "-n", "sh", "-c", f'{setup}; exec "$@"', "sh", *shop.command(*words)]
    return subprocess.run(
        command, cwd=shop.path, env=shop.environ(), capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("setup", [IS_DOWN, HAS_NO_IPV4])
def test_a_machine_without_loopback_is_refused_at_once(shop: Shop, setup: str) -> None:
    ended = without_loopback(shop, setup, "train", "job.py", "--ranks", "2", "--run-dir", "run")
    assert ended.returncode == 3 and "127.0.0.1 can't be reached" in ended.stderr, ended
    assert "ip link set lo up" in ended.stderr and "Traceback" not in ended.stderr
    assert not (shop.path / "run" / "logs").exists(), "no rank was started"


@pytest.mark.soak
@pytest.mark.parametrize("setup", [IS_DOWN, HAS_NO_IPV4])
def test_one_rank_needs_no_loopback(shop: Shop, setup: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_FORKSERVER_COMMAND", raising=False)  # it would start the rank outside the namespace
    words = ("train", "job.py", "--ranks", "1", "--run-dir", "run", "--train.steps", "4")
    ended = without_loopback(shop, setup, *words)
    assert ended.returncode == 0, ended


def test_ranks_that_can_open_no_more_sockets_name_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("[enforce fail at socket.cc:24] rv != -1. -1 vs -1. socket: Too many open files")

    monkeypatch.setattr(process_group, "_next_store", fail)
    with pytest.raises(MachineError, match="could not join the other ranks") as caught:
        World.join(launch_info=LaunchInfo(world_size=2), device_type="cpu", backend="gloo", timeout_seconds=1)
    assert "may open" in caught.value.cause and caught.value.hint == "ulimit -n 4096"
