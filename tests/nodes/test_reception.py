"""The reception of nodes that come and go: who gets a place, and with which number."""

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest

from paceline.commands.common.node_admission import NodeAdmission
from paceline.config.settings import Nodes
from paceline.errors import MachineError
from paceline.nodes.examination import RUN, Examination, answer_head
from paceline.nodes.fact_findings import judge_facts
from paceline.nodes.head_connection import RunOverError, join_head
from paceline.nodes.line_channel import LineChannel
from paceline.nodes.machine_facts import MachineFacts
from paceline.nodes.node_link import NodeLink
from paceline.nodes.node_meeting import Reception, listen_as_head
from paceline.nodes.node_place import NodePlace
from tests.nodes.test_examination import free_port
from tests.nodes.test_fact_findings import machine
from tests.waiting import wait_until


class Door:
    """A head that welcomes two to four nodes."""

    def __init__(self) -> None:
        self.place = NodePlace(num_nodes=4, least_nodes=2, head_host="127.0.0.1", port=free_port(), node=None)
        listener = listen_as_head(self.place)
        assert listener is not None
        self.listener = listener
        self.lines: list[str] = []
        self.channels: list[LineChannel] = []

    def come(self, node: int | None = None) -> LineChannel:
        own = NodePlace(num_nodes=4, least_nodes=2, head_host="127.0.0.1", port=self.place.port, node=node)
        self.channels.append(join_head(own, wait_seconds=5))
        return self.channels[-1]

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.close()


@pytest.fixture
def reception(door: Door) -> Iterator[Reception]:
    made = Reception(door.listener, door.place)
    yield made
    made.close()
    for arrival in made._arrivals:
        arrival.channel.close()


def wait_for(reception: Reception, lines: list[str], *, last_call: float = 0.0) -> list[int]:
    seats, findings = reception.wait(wait_seconds=5, report=lines.append, last_call_seconds=last_call)
    assert not findings
    return sorted(seats)


def test_the_smallest_number_waits_for_more_until_the_last_call(door: Door, reception: Reception) -> None:
    door.come()
    start_time = time.monotonic()
    assert wait_for(reception, door.lines, last_call=0.6) == [1]
    assert time.monotonic() - start_time >= 0.6


def test_a_node_that_leaves_during_the_last_call_does_not_count(door: Door, reception: Reception) -> None:
    door.come()
    door.come().close()
    wait_until(lambda: bool(reception._arrivals))
    assert wait_for(reception, door.lines, last_call=1.0) == [1]


def test_a_node_that_comes_later_gets_a_free_number_even_if_its_own_is_taken(door: Door, reception: Reception) -> None:
    """A node that was cut off comes again with its number, before the head has seen that it is lost."""
    door.come(node=1)
    assert wait_for(reception, door.lines) == [1]
    with pytest.raises(MachineError, match="all nodes are here already"):
        door.come(node=1)
    reception.open_again()
    door.come(node=1)
    seats, findings = reception.next_arrivals(seconds=5)
    assert (sorted(seats), findings) == ([2], [])
    assert reception.next_arrivals(seconds=0.1) == ({}, [])


def test_the_place_of_a_lost_node_is_free_again(door: Door, reception: Reception) -> None:
    door.come()
    seats, _ = reception.wait(wait_seconds=5, report=door.lines.append)
    reception.open_again()
    for _ in range(2):
        door.come()
    late = reception.next_arrivals(seconds=5)[0]
    late |= reception.next_arrivals(seconds=5 if len(late) < 2 else 0)[0]
    assert sorted(late) == [2, 3]
    with pytest.raises(MachineError, match="all nodes are here already"):
        door.come()
    reception.vacate(seats[1].channel)
    door.come()
    assert sorted(reception.next_arrivals(seconds=5)[0]) == [1]


def answer(door: Door, channel: LineChannel, tmp_path: Path, facts: MachineFacts) -> Callable[[], object]:
    """Answer the head as a member in a thread, and return a function for the last message."""
    ends: list[object] = []

    def run() -> None:
        try:
            ends.append(answer_head(channel, door.place, read_facts=lambda: facts, run_folder=tmp_path))
        except (OSError, MachineError) as error:
            ends.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()

    def end() -> object:
        thread.join(10)
        return ends[0]

    return end


def test_one_node_that_does_not_fit_is_no_harm_to_another_that_comes_with_it(
    door: Door, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Nodes(wait=5.0, last_call=0.0)
    facts = machine(0, address="127.0.0.1")
    admission = NodeAdmission(door.listener, door.place, facts, run_folder=tmp_path, settings=settings)
    first = answer(door, door.come(), tmp_path, machine(1, address="127.0.0.1"))
    first_members = admission.admit_first()
    assert sorted(first_members) == [1]
    assert first()["do"] == RUN  # type: ignore[index]
    admission._reception.open_again()
    good, bad = door.come(), door.come()
    admission.open_again()  # now somebody looks
    ends = [
        answer(door, good, tmp_path, machine(2, address="127.0.0.1")),
        answer(door, bad, tmp_path, machine(3, address="127.0.0.1", packages={"torch": "0.1", "numpy": "2.1.0"})),
    ]
    results = [end() for end in ends]
    wait_until(lambda: not admission._examined)
    assert [result["do"] for result in results] == [RUN, "end"], results  # type: ignore[index]
    admission.close()
    taken = admission.take()
    assert sorted(taken) == [2]
    assert "not admitted: torch" in capsys.readouterr().err
    for member in [*first_members.values(), *taken.values()]:
        member.link.close()


def test_a_trouble_of_a_machine_is_said_once_and_not_again_with_each_node_that_comes(
    door: Door, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = {"address": "127.0.0.1", "free_shared_memory": 1 << 20}
    admission = NodeAdmission(
        door.listener, door.place, machine(0, **full), run_folder=tmp_path, settings=Nodes(wait=5.0, last_call=0.0)
    )
    first = answer(door, door.come(), tmp_path, machine(1, address="127.0.0.1"))
    members = admission.admit_first()
    first()
    assert capsys.readouterr().err.count("/dev/shm has 1.0 MiB free") == 1
    admission.open_again()
    for node, more in ((2, {}), (3, full)):
        end = answer(door, door.come(), tmp_path, machine(node, **{"address": "127.0.0.1", **more}))
        end()
        wait_until(lambda: not admission._examined)
        assert capsys.readouterr().err.count("/dev/shm has 1.0 MiB free") == (1 if more else 0), "another machine"
    admission.close()
    for member in [*members.values(), *admission.take().values()]:
        member.link.close()


def test_a_note_is_said_once(door: Door, tmp_path: Path) -> None:
    admission = NodeAdmission(door.listener, door.place, machine(0), run_folder=tmp_path, settings=Nodes())
    facts = {node: machine(node, host_address="127.0.1.1") for node in range(3)}
    both, later = ({0: facts[0], 1: facts[1]}, {0: facts[0], 2: facts[2]})
    notes = [admission._new_findings(Examination(facts=own, findings=tuple(judge_facts(own)))) for own in (both, later)]
    assert [len(found) for found in notes] == [1, 0]
    admission.close()


@pytest.mark.parametrize("has_met", [False, True])
def test_a_spare_node_waits_for_a_head_that_is_killed_while_it_answers(has_met: bool) -> None:
    answers = [b"" if has_met else b'{"do": "end", "is_full": true}\n', b"", b'{"do": "welcome"}\n']
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for text in answers:
                connection, _ = listener.accept()
                connection.recv(4096)
                connection.sendall(text)
                connection.close()

        listener.settimeout(60)
        thread = Thread(target=answer, daemon=True)
        thread.start()
        place = NodePlace(num_nodes=2, head_host="127.0.0.1", port=listener.getsockname()[1], node=1)
        lines: list[str] = []
        join_head(place, wait_seconds=60, waits_for_place=True, has_met=has_met, report=lines.append).close()
        thread.join()
    assert len([line for line in lines if "is gone" in line]) == 1, lines
    assert len([line for line in lines if "all nodes are here already" in line]) == (not has_met), lines


def test_a_node_that_waits_for_a_place_learns_that_the_run_has_ended(door: Door, tmp_path: Path) -> None:
    """And one that comes while the head says so, too; nobody else keeps the head from ending."""
    admission = NodeAdmission(door.listener, door.place, machine(0), run_folder=tmp_path, settings=Nodes())
    for node in (1, 2, 3):
        door.come(node)
    over: list[RunOverError] = []

    def wait_for_a_place() -> None:
        try:
            join_head(door.place, wait_seconds=60, waits_for_place=True, report=door.lines.append)
        except RunOverError as error:
            over.append(error)

    threads = [Thread(target=wait_for_a_place, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(door.lines) == 2)
    admission.close(0, "done")
    for thread in threads:
        thread.join(10)
    assert [(error.exit_code, str(error)) for error in over] == [(0, "done")] * 2
    start_time = time.monotonic()
    admission.close(1, "node 0 has ended")
    assert time.monotonic() - start_time < 0.5
    for arrival in list(admission._reception._arrivals):
        admission.vacate(arrival.channel)


def test_a_stranger_at_the_heads_port_is_not_waited_for() -> None:
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        thread = Thread(target=lambda: listener.accept()[0].close(), daemon=True)
        thread.start()
        place = NodePlace(num_nodes=2, head_host="127.0.0.1", port=listener.getsockname()[1], node=1)
        with pytest.raises(MachineError, match="another program than paceline answers"):
            join_head(place, wait_seconds=5, waits_for_place=True, report=lines.append)
        thread.join()
    assert lines == []


def test_a_connection_on_which_nothing_comes_is_no_silence_if_new_ones_work(
    door: Door, reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a cut of the network, while TCP waits before it repeats what was lost."""
    monkeypatch.setattr(LineChannel, "send", _send_no_beat)
    member = door.come()
    wait_for(reception, door.lines)
    links = [NodeLink(reception._arrivals[0].channel), NodeLink(member)]
    longest, end_time = 0.0, time.monotonic() + 6
    while time.monotonic() < end_time:
        longest = max(longest, *(link.silence_seconds for link in links))
        time.sleep(0.05)
    assert 1.5 < longest < 4.5, "signs come after two seconds of silence, one a second"
    reception.close()
    wait_until(lambda: min(link.silence_seconds for link in links) > 4.5)
    for link in links:
        link.close()


def test_only_a_node_that_has_a_place_gets_an_answer_to_its_sign(door: Door, reception: Reception) -> None:
    channel = door.come()
    wait_until(lambda: bool(reception._arrivals))
    assert channel.send_sign(timeout_seconds=2) and reception._arrivals[0].channel.take_sign()
    for key in ("another", ""):
        stranger = LineChannel(socket.create_connection(("127.0.0.1", door.place.port)))
        with pytest.raises(OSError, match="closed"):
            stranger.ask({"do": "sign", "key": key}, timeout_seconds=2)
        stranger.close()
    reception.vacate(reception._arrivals[0].channel)
    assert not channel.send_sign(timeout_seconds=2), "it was given up"


_SEND = LineChannel.send


def _send_no_beat(channel: LineChannel, value: object) -> None:
    if value != {"do": "beat"}:
        _SEND(channel, value)
