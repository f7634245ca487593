"""The head's view of the other nodes: how their parts end, and when one of them is lost."""

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from paceline.checkpoint.files.peers.memory_server import MemoryEndpoint
from paceline.checkpoint.files.peers.peer_files import write_endpoint
from paceline.config.settings import Nodes
from paceline.filesystem.atomic_files import write_json
from paceline.launch.failures.failure_record import LOST_NODE, Failure, write_failure
from paceline.launch.failures.rank_position import RankPosition, read_remote_positions
from paceline.launch.several_nodes import node_group
from paceline.launch.several_nodes.attempt_progress import AttemptProgress, PartResult
from paceline.launch.several_nodes.broken_links import BrokenLink, find_broken_links
from paceline.launch.several_nodes.node_group import Member, NodeGroup
from paceline.launch.several_nodes.node_messages import (
    NodeLeaves,
    NodeLeft,
    PartEnded,
    RankPositions,
    as_message,
    part_ended,
)
from paceline.launch.several_nodes.node_stays import lost_node_lines, read_node_stays
from paceline.nodes.line_channel import LineChannel
from paceline.nodes.node_link import NodeLink
from paceline.run_folder.run_folder import RunFolder
from tests.nodes.test_line_channel import as_tcp
from tests.waiting import wait_until

DONE = PartResult(exit_code=0, failure=None, progress=AttemptProgress(start_step=0, step=12))
REQUEST = {"payload": {"run": "runs/a", "settings": {}}, "ranks": 4}


class Nodes3:
    """A head with two members, which this test plays."""

    def __init__(
        self,
        *,
        patience: float = 30.0,
        restarts: int = 3,
        wait: float = 0.5,
        last_call: float = 0.0,
        counts: tuple[int, ...] = (3,),
    ) -> None:
        self.channels: dict[int, LineChannel] = {}
        self.replacements: dict[int, Member] = {}
        members = {node: self.member(node) for node in (1, 2)}
        self.vacated: list[LineChannel] = []
        settings = Nodes(patience=patience, wait=wait, last_call=last_call)
        self.group = NodeGroup(
            members, own_host="host0", interface_address="127.0.0.1", ranks_per_node=2, node_counts=counts,
            settings=settings, max_restarts=restarts, admission=SimpleNamespace(take=self.take, vacate=self.vacate, close=lambda code, text: None),
        )  # fmt: skip

    def member(self, node: int) -> Member:
        ours, theirs = socket.socketpair()
        self.channels[node] = LineChannel(as_tcp(theirs))
        return Member(host=f"host{node}", link=NodeLink(LineChannel(as_tcp(ours))))

    def close(self) -> None:
        self.group.end(0, "done")
        for channel in self.channels.values():
            channel.close()

    def take(self) -> Mapping[int, Member]:
        members, self.replacements = self.replacements, {}
        return members

    def vacate(self, channel: LineChannel) -> None:
        self.vacated.append(channel)

    def say(
        self, node: int, *, code: int = 0, failure: Failure | None = None, attempt: int = 1, step: int = 12
    ) -> None:
        progress = AttemptProgress(start_step=3, step=step)
        self.channels[node].send(as_message(part_ended(attempt, exit_code=code, failure=failure, progress=progress)))

    def heard(self, node: int) -> list[Mapping[str, Any]]:
        """What the head has said to a member, without beats; after the last message, a moment passes."""
        messages: list[Mapping[str, Any]] = []
        with suppress(OSError):  # the head has closed the link
            while batch := self.channels[node].receive_available(seconds=0.3):
                messages += [message for message in batch if message != {"do": "beat"}]
        return messages


@pytest.fixture
def nodes() -> Iterator[Nodes3]:
    made = Nodes3()
    yield made
    made.close()


def finish(nodes: Nodes3, own: PartResult = DONE) -> PartResult:
    return nodes.group.finish_attempt(own, is_abandoned=lambda: False)


def test_each_node_gets_its_ranks_and_the_port_that_is_kept_for_rank_0(nodes: Nodes3, tmp_path: Path) -> None:
    part, path = nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=True)
    starts = {node: nodes.heard(node)[0] for node in (1, 2)}
    assert part.ranks == range(2) and [starts[node]["first_rank"] for node in (1, 2)] == [2, 4]
    assert {start["port"] for start in starts.values()} == {part.port} and part.port
    plan = {"nodes": [0, 1, 2], "node": 0, "step": -1, "sources": {}}
    request = {**REQUEST, "payload": {**REQUEST["payload"], "peer_plan": plan}}
    assert starts[1]["exact"] is True and starts[1]["request"] == request and path.is_file()
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", part.port))


def test_an_attempt_is_done_if_all_parts_are(nodes: Nodes3, tmp_path: Path) -> None:
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    nodes.say(1, step=11)
    nodes.say(2, code=75)
    result = finish(nodes)
    assert (result.exit_code, result.failure) == (75, None)
    assert result.progress == AttemptProgress(start_step=3, step=12)


def test_the_failure_of_a_member_ends_the_others_and_names_its_host(nodes: Nodes3, tmp_path: Path) -> None:
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    assert not nodes.group.has_failed()
    failure = Failure(rank=2, kind="signal", message="SIGKILL", step=7, monotonic_ns=time.monotonic_ns())
    nodes.say(1, code=1, failure=failure)
    wait_until(nodes.group.has_failed)
    nodes.say(2, code=1)
    lost = Failure(rank=0, kind="RuntimeError", message="Connection closed by peer", monotonic_ns=1)
    result = finish(nodes, PartResult(exit_code=1, failure=lost, progress=AttemptProgress()))
    assert result.failure is not None and result.exit_code == 1
    assert result.failure.summary == "rank 2 on host1 killed by SIGKILL at step 7"
    assert nodes.heard(2)[-1] == {"do": "end_part", "attempt": 1}


def test_a_failure_that_the_head_reports_of_another_rank_has_the_host_of_that_rank(
    nodes: Nodes3, tmp_path: Path
) -> None:
    """All ranks compare their weights, and rank 0 says whose copy differs."""
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    nodes.say(1, code=1)
    nodes.say(2, code=1)
    differs = Failure(rank=4, kind="DesyncError", message="its weights differ", monotonic_ns=1)
    result = finish(nodes, PartResult(exit_code=1, failure=differs, progress=AttemptProgress()))
    assert result.failure is not None and result.failure.host == "host2"


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_broken_link_is_recorded_unless_one_of_its_nodes_is_lost(
    nodes: Nodes3, tmp_path: Path, is_lost: bool
) -> None:
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    failure = Failure(rank=2, kind="RuntimeError", message="Connection reset by peer", monotonic_ns=1)
    links = [BrokenLink(node=2, problem="timed out")]
    ended = part_ended(1, exit_code=1, failure=failure, progress=AttemptProgress(), broken_links=links)
    nodes.channels[1].send(as_message(ended))
    if is_lost:
        nodes.channels[2].close()
    else:
        nodes.say(2, code=1)
    error = Failure(rank=0, kind="ValueError", message="of the job", monotonic_ns=1)  # the first failure in any case
    first = finish(nodes, PartResult(exit_code=1, failure=error, progress=AttemptProgress())).failure
    line = "the link between node 1 (host1, ranks 2-3) and node 2 (host2, ranks 4-5) does not work: timed out"
    assert first is not None and first.broken_links == ([] if is_lost else [line])
    assert first.summary == f"{'' if is_lost else f'{line}; '}rank 0 on host0 failed: ValueError: of the job"


def test_links_are_tried_only_after_a_lost_connection(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        write_endpoint(tmp_path, 1, MemoryEndpoint(host="127.0.0.1", port=listener.getsockname()[1], token="t"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        write_endpoint(tmp_path, 2, MemoryEndpoint(host="127.0.0.1", port=listener.getsockname()[1], token="t"))
        lost = Failure(rank=0, kind="RuntimeError", message="Connection reset by peer")
        found = find_broken_links(tmp_path, lost, own_node=0, nodes=[0, 1, 2, 3])  # node 3 has said nothing
        assert found == [BrokenLink(node=1, problem="Connection refused")]
        own = Failure(rank=0, kind="ValueError", message="of the job")
        assert find_broken_links(tmp_path, own, own_node=0, nodes=[0, 1, 2]) == []
        assert find_broken_links(tmp_path, None, own_node=0, nodes=[0, 1, 2]) == []
        write_json(tmp_path / "request.json", {"ranks": 3})
        write_failure(tmp_path, rank=1, error=ValueError("of the job"))
        assert find_broken_links(tmp_path, None, own_node=0, nodes=[0, 1, 2]) == []
        write_failure(tmp_path, rank=2, error=RuntimeError("Timed out waiting 10000ms for send operation to complete"))
        assert [link.node for link in find_broken_links(tmp_path, None, own_node=0, nodes=[0, 1, 2])] == [1]


def test_a_failure_has_its_time_on_the_clock_of_the_head(nodes: Nodes3, tmp_path: Path) -> None:
    """Each machine's monotonic clock begins anywhere."""
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    theirs = Failure(rank=2, kind="ValueError", message="later", monotonic_ns=time.monotonic_ns())
    message = as_message(part_ended(1, exit_code=1, failure=theirs, progress=AttemptProgress()))
    message = {**message, "failure": {**message["failure"], "monotonic_ns": 5}, "failure_age_seconds": 0.5}
    nodes.channels[1].send(message)
    nodes.say(2)
    ours = Failure(rank=0, kind="ValueError", message="first", monotonic_ns=time.monotonic_ns() - 10**9)
    result = finish(nodes, PartResult(exit_code=1, failure=ours, progress=AttemptProgress()))
    assert result.failure is not None and result.failure.message == "first"


def test_the_end_of_an_earlier_attempt_does_not_count(nodes: Nodes3, tmp_path: Path) -> None:
    nodes.group.start_attempt(RunFolder(tmp_path), 2, REQUEST, exact=False)
    nodes.say(1, code=1, attempt=1)
    nodes.channels[1].send({"do": "ended"})
    nodes.channels[1].send("nonsense")
    nodes.say(1, attempt=2)
    nodes.say(2, attempt=2)
    assert finish(nodes).exit_code == 0


def test_a_node_whose_agent_ends_is_lost_and_the_run_can_be_started_again(nodes: Nodes3, tmp_path: Path) -> None:
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    nodes.channels[1].close()
    wait_until(nodes.group.has_failed)
    nodes.say(2, code=1, step=9)
    result = finish(nodes, PartResult(exit_code=1, failure=None, progress=AttemptProgress(step=8)))
    assert result.exit_code == 75 and result.failure is not None and result.failure.kind == LOST_NODE
    expected = "node 1 (host1, ranks 2-3) is gone: its agent has ended, or the connection to it was lost; last step 9"
    assert result.failure.summary == expected


def test_the_last_step_is_that_of_the_attempt_before_if_no_rank_has_begun_a_step(nodes: Nodes3, tmp_path: Path) -> None:
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    for node in (1, 2):
        nodes.say(node, code=1, step=33)
    finish(nodes)
    nodes.group.start_attempt(RunFolder(tmp_path), 2, REQUEST, exact=False)
    nodes.channels[1].close()
    nodes.channels[2].close()
    result = finish(nodes, PartResult(exit_code=1, failure=None, progress=AttemptProgress()))
    assert result.failure is not None and result.failure.message.endswith("; last step 33"), result.failure.message


class NodesOfOneName(Nodes3):
    """Members whose machines have the same host name."""

    def member(self, node: int) -> Member:
        link = super().member(node).link
        link.channel.peer_address = f"10.0.0.{node + 1}"
        return Member(host="ip-10", link=link)


def test_nodes_with_one_host_name_are_told_apart_by_their_address(tmp_path: Path) -> None:
    nodes = NodesOfOneName()
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    failure = Failure(rank=4, kind="RuntimeError", message="no", screen="no", exit_code=1)
    nodes.say(2, code=1, failure=failure)
    wait_until(nodes.group.has_failed)
    assert nodes.group._results[2].failure.rank_name == "rank 4 on ip-10 at 10.0.0.3"  # type: ignore[union-attr]
    nodes.channels[1].close()
    wait_until(lambda: nodes.group.has_failed() and 1 in nodes.group._results)
    lost = nodes.group._results[1].failure
    assert lost is not None and lost.message.startswith("node 1 (ip-10 at 10.0.0.2, ranks 2-3) is gone"), lost
    (line,) = lost_node_lines(tmp_path, 1)
    assert line.startswith("node 1 (ip-10 at 10.0.0.2, ranks 2-3) left at")
    assert [stay.host for stay in read_node_stays(tmp_path)[0].nodes] == ["host0", "ip-10", "ip-10"]
    nodes.close()


def test_a_silent_node_is_named_and_is_lost_after_the_patience(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = Nodes3(patience=1.0)

    def beat() -> bool:
        nodes.channels[2].send({"do": "beat"})
        return nodes.group.has_failed()

    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    assert not nodes.group.has_failed()
    wait_until(beat)
    nodes.say(2, code=1)
    result = finish(nodes)
    assert result.failure is not None and "node 1 (host1, ranks 2-3) is gone: nothing for 1 s" in result.failure.message
    assert "node 1 (host1, ranks 2-3): nothing for 1 s; it counts as gone after 1 s" in capsys.readouterr().err
    nodes.close()


def test_a_head_that_hears_no_member_any_more_blames_its_own_network(tmp_path: Path) -> None:
    nodes = Nodes3(patience=1.0)
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    wait_until(nodes.group.has_failed)
    result = finish(nodes, replace(DONE, exit_code=1))
    assert result.exit_code == 75 and result.failure is not None and result.failure.kind == LOST_NODE
    assert result.failure.message == (
        "node 0 (host0, ranks 0-1) itself is probably cut off from the network: nothing for 1 s from "
        "node 1 (host1, ranks 2-3) and node 2 (host2, ranks 4-5); last step 12"
    )
    assert (
        "check first, on node 0: its link (ip -br link), then the way to another node (ping " in result.failure.screen
    )
    nodes.close()


def test_all_nodes_that_are_lost_at_once_are_named(nodes: Nodes3, tmp_path: Path) -> None:
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    for node in (1, 2):
        nodes.channels[node].close()
    wait_until(nodes.group.has_failed)
    result = finish(nodes, PartResult(exit_code=1, failure=None, progress=AttemptProgress(step=8)))
    assert result.failure is not None and result.failure.summary == (
        "node 1 (host1, ranks 2-3) and node 2 (host2, ranks 4-5) are gone: "
        "its agent has ended, or the connection to it was lost; last step 8"
    )
    assert result.failure.said == {"lost_nodes": ["node 1 (host1, ranks 2-3)", "node 2 (host2, ranks 4-5)"]}


def test_a_node_that_is_lost_after_its_part_has_ended_is_named_too(
    nodes: Nodes3, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    nodes.channels[1].close()
    nodes.say(2, code=1)
    wait_until(nodes.group.has_failed)
    finish(nodes, PartResult(exit_code=1, failure=None, progress=AttemptProgress(step=8)))
    nodes.channels[2].close()
    nodes.group.gather(is_stopped=lambda: False)
    assert "node 2 (host2, ranks 4-5) is gone: its agent has ended" in capsys.readouterr().err


@pytest.mark.parametrize("is_first_closed", [True, False])
def test_members_whose_agents_end_are_not_cut_off(tmp_path: Path, is_first_closed: bool) -> None:
    """An agent that ends is noticed over the network, which therefore works."""
    nodes = Nodes3(patience=1.0)
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    nodes.channels[1].close()
    if is_first_closed:
        nodes.channels[2].close()
    wait_until(nodes.group.has_failed)
    result = finish(nodes, replace(DONE, exit_code=1))
    assert result.failure is not None and " gone: " in result.failure.message
    assert "cut off" not in result.failure.message
    nodes.close()


def test_a_node_says_why_it_leaves_and_hears_that_it_was_given_up(tmp_path: Path) -> None:
    """The healthy one of two nodes is not the one to blame if the other stood still."""
    nodes = Nodes3(patience=1.0)
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    nodes.channels[2].send(as_message(NodeLeft(reason="it has given up node 0, from which nothing came for 5 s")))
    nodes.channels[2].close()
    wait_until(nodes.group.has_failed)
    nodes.say(1, code=1)
    result = finish(nodes)
    assert result.failure is not None and "ranks 4-5) is gone: it has given up node 0" in result.failure.message
    wait_until(lambda: nodes.group.has_failed() and 1 in nodes.group._lost)
    [last] = [message for message in nodes.heard(1) if message["do"] == "end"]
    assert last["may_return"] is True and "node 0 has given this node up: nothing came from it" in last["text"]
    nodes.close()


def test_another_node_takes_the_place_of_a_lost_one(nodes: Nodes3, tmp_path: Path) -> None:
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    nodes.channels[1].close()
    nodes.say(2, code=1)
    finish(nodes)
    assert nodes.group.gather(is_stopped=lambda: False) == "node 1 did not come within 0 s."
    nodes.replacements = {1: nodes.member(1)}
    assert nodes.group.gather(is_stopped=lambda: False) == ""
    nodes.group.start_attempt(RunFolder(tmp_path), 2, REQUEST, exact=False)
    assert nodes.heard(1)[0]["attempt"] == 2 and not nodes.group.has_failed()


def test_members_end_with_the_exit_code_of_the_run() -> None:
    nodes = Nodes3()
    nodes.group.end(4, "a difference")
    assert nodes.heard(2) == [{"do": "end", "node": 2, "exit_code": 4, "text": "a difference", "may_return": False}]
    nodes.close()


def test_a_failure_arrives_as_it_was_but_for_its_time_and_its_host() -> None:
    failure = Failure(
        rank=2, kind="ValueError", message="x", said={"numbers": {"a": 1.5}}, monotonic_ns=time.monotonic_ns()
    )
    message = msgspec.json.encode(part_ended(1, exit_code=1, failure=failure, progress=AttemptProgress(step=3)))
    ended = msgspec.convert(msgspec.json.decode(message), PartEnded)
    arrived = ended.read_failure(host="host1")
    assert arrived is not None and ended.progress.step == 3
    assert replace(arrived, monotonic_ns=0, host="") == replace(failure, monotonic_ns=0)
    assert abs(arrived.monotonic_ns - failure.monotonic_ns) < 10**9


def test_a_node_that_ends_after_its_part_is_replaced_but_its_result_stands(nodes: Nodes3, tmp_path: Path) -> None:
    """As after two stop signals to the agent of node 1."""
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    nodes.say(1, code=130)
    nodes.channels[1].close()
    wait_until(nodes.group.has_failed)
    nodes.say(2, code=1)
    result = finish(nodes, PartResult(exit_code=1, failure=None, progress=AttemptProgress()))
    assert (result.exit_code, result.failure) == (130, None)


def test_a_member_that_does_not_end_its_ranks_is_given_up(
    nodes: Nodes3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link still beats, but its main thread hangs, perhaps on a disk."""
    monkeypatch.setattr(node_group, "_END_SECONDS", 0.5)
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    nodes.say(2, code=1)
    own = Failure(rank=0, kind="ValueError", message="x", monotonic_ns=1)
    deadline = time.monotonic() + 20

    def is_over() -> bool:
        nodes.channels[1].send({"do": "beat"})
        return time.monotonic() > deadline

    part = PartResult(exit_code=1, failure=own, progress=AttemptProgress())
    result = nodes.group.finish_attempt(part, is_abandoned=is_over)
    assert result.exit_code == 1 and result.failure is not None and result.failure.kind == "ValueError"
    nodes.group.max_restarts = 0
    assert "node 1 (host1, ranks 2-3) is gone, too" in nodes.group.gather(is_stopped=lambda: False)


def test_a_second_node_that_is_lost_during_the_wait_for_the_first_is_replaced_too(tmp_path: Path) -> None:
    nodes = Nodes3(restarts=3)
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    nodes.channels[1].close()
    nodes.say(2, code=1)
    finish(nodes)
    nodes.channels[2].close()
    nodes.replacements = {1: nodes.member(1), 2: nodes.member(2)}
    assert nodes.group.gather(is_stopped=lambda: False) == ""
    nodes.group.start_attempt(RunFolder(tmp_path), 2, REQUEST, exact=False)
    assert [nodes.heard(node)[0]["attempt"] for node in (1, 2)] == [2, 2] and not nodes.group.has_failed()
    nodes.close()


@pytest.fixture
def elastic() -> Iterator[Nodes3]:
    made = Nodes3(counts=(4, 3, 2))
    yield made
    made.close()


def test_a_node_that_comes_joins_the_next_attempt(elastic: Nodes3, tmp_path: Path) -> None:
    assert (elastic.group.num_nodes, elastic.group.num_ranks) == (3, 6)
    elastic.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    assert elastic.group.pending_change(can_grow=lambda: True) == ""
    elastic.replacements = {3: elastic.member(3)}
    assert elastic.group.pending_change() == ""  # it may be in the middle of its start
    said = elastic.group.pending_change(can_grow=lambda: True)
    assert said == "node 3 (host3) has come; saving, then continuing on 4 nodes"
    for node in (1, 2):
        elastic.say(node, code=75)
    assert finish(elastic, replace(DONE, exit_code=75)).exit_code == 75
    assert elastic.group.gather(is_stopped=lambda: False) == "" and elastic.group.num_ranks == 8
    elastic.group.start_attempt(RunFolder(tmp_path), 2, REQUEST, exact=False)
    assert elastic.heard(3)[0]["first_rank"] == 6


def test_ranks_are_numbered_by_the_nodes_that_are_left(elastic: Nodes3, tmp_path: Path) -> None:
    elastic.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    elastic.channels[1].send(as_message(NodeLeaves()))
    wait_until(lambda: not elastic.group.has_failed() and elastic.group.pending_change() != "")
    said = elastic.group.pending_change()
    assert said == "node 1 (host1, ranks 2-3) was asked to stop; saving, then continuing without it"
    for node in (1, 2):
        elastic.say(node, code=75)
    finish(elastic, replace(DONE, exit_code=75))
    elastic.channels[1].close()
    assert elastic.group.gather(is_stopped=lambda: False) == "" and elastic.group.num_ranks == 4
    elastic.group.start_attempt(RunFolder(tmp_path), 2, REQUEST, exact=False)
    assert [message["first_rank"] for message in elastic.heard(2) if message["do"] == "start"] == [4, 2]


def test_a_node_that_only_waits_may_be_lost_without_a_failure(tmp_path: Path) -> None:
    """With two or four nodes, the third one has nothing to do."""
    nodes = Nodes3(counts=(4, 2))
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    assert nodes.group.num_nodes == 2 and nodes.heard(2) == []
    nodes.channels[2].close()
    wait_until(lambda: nodes.group.has_failed() or bool(nodes.vacated))
    nodes.say(1)
    result = finish(nodes)
    assert (result.exit_code, result.failure) == (0, None)
    nodes.close()


def test_after_a_loss_another_node_may_come_until_the_last_call(tmp_path: Path) -> None:
    nodes = Nodes3(counts=(3, 2), last_call=1.0, wait=30.0)
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    nodes.channels[1].close()
    wait_until(nodes.group.has_failed)
    nodes.say(2, code=1)
    finish(nodes)
    start_time = time.monotonic()
    assert nodes.group.gather(is_stopped=lambda: False) == "" and nodes.group.num_nodes == 2
    assert time.monotonic() - start_time >= 1.0 and len(nodes.vacated) == 1
    nodes.close()


def test_too_few_nodes_end_the_run_after_the_wait(tmp_path: Path) -> None:
    nodes = Nodes3(counts=(4, 3))
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    nodes.channels[1].close()
    wait_until(nodes.group.has_failed)
    nodes.say(2, code=1)
    finish(nodes)
    expected = "another node (2 of at least 3 are here) did not come within 0 s."
    assert nodes.group.gather(is_stopped=lambda: False) == expected
    assert nodes.group.gather(is_stopped=lambda: True) == "a stop was requested."
    nodes.close()


def test_what_silent_ranks_do_is_known_if_all_members_have_said_it(
    nodes: Nodes3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)

    def report(node: int, attempt: int = 1) -> RankPosition:
        position = RankPosition(rank=2 * node, pid=7, state="S", step=4, silent_seconds=3.0, host=f"host{node}")
        nodes.channels[node].send(as_message(RankPositions(attempt=attempt, positions=(position,))))
        wait_until(lambda: (not nodes.group.has_failed() and node in nodes.group._positions) or attempt == 2)
        return position

    first = report(1)
    report(2, attempt=2)  # of another attempt
    assert nodes.group.silent_positions() is None
    assert read_remote_positions(tmp_path / "logs/attempt-1") is None
    both = [first, report(2)]
    assert nodes.group.silent_positions() == both == read_remote_positions(tmp_path / "logs/attempt-1")
    monkeypatch.setattr(node_group, "_POSITIONS_SECONDS", 0.0)  # as later, when the ranks train again
    assert nodes.group.silent_positions() is None


def test_a_node_that_is_asked_twice_to_stop_is_lost_and_the_others_continue(elastic: Nodes3, tmp_path: Path) -> None:
    elastic.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    elastic.channels[1].send(as_message(NodeLeaves()))
    elastic.say(1, code=130)
    wait_until(elastic.group.has_failed)
    elastic.say(2, code=1)
    result = finish(elastic, PartResult(exit_code=1, failure=None, progress=AttemptProgress()))
    assert result.failure is not None and result.failure.kind == LOST_NODE and result.exit_code == 75
    assert "node 1 (host1, ranks 2-3) is gone: it was asked twice to stop" in result.failure.message
    assert elastic.group.gather(is_stopped=lambda: False) == "" and elastic.group.num_nodes == 2


def test_a_node_that_left_before_anybody_looked_is_no_end_of_the_run(elastic: Nodes3, tmp_path: Path) -> None:
    elastic.group.start_attempt(RunFolder(tmp_path), 1, REQUEST, exact=False)
    elastic.channels[1].send(as_message(NodeLeaves()))
    for node in (1, 2):
        elastic.say(node, code=75)
    elastic.channels[1].close()
    wait_until(lambda: bool(elastic.group._members[1].link.loss))
    finish(elastic, replace(DONE, exit_code=75))
    assert elastic.group.pending_change().startswith("node 1 (host1, ranks 2-3) was asked to stop")
    assert elastic.group.gather(is_stopped=lambda: False) == "" and elastic.group.num_nodes == 2
    elastic.replacements = {1: elastic.member(1)}  # it comes again
    elastic.group.start_attempt(RunFolder(tmp_path), 2, REQUEST, exact=False)
    assert "node 1 (host1) has come" in elastic.group.pending_change(can_grow=lambda: True)


def test_a_node_that_leaves_between_two_attempts_is_not_waited_for(tmp_path: Path) -> None:
    nodes = Nodes3(counts=(3, 2), last_call=20.0)
    nodes.channels[1].send(as_message(NodeLeaves()))
    nodes.channels[1].close()
    wait_until(lambda: bool(nodes.group._members[1].link.loss))
    start_time = time.monotonic()
    assert nodes.group.gather(is_stopped=lambda: False) == "" and nodes.group.num_nodes == 2
    assert time.monotonic() - start_time < 10
    nodes.close()


def test_a_last_call_may_be_longer_than_the_wait(tmp_path: Path) -> None:
    nodes = Nodes3(counts=(3, 2), last_call=1.0, wait=0.1)
    nodes.channels[1].close()
    wait_until(lambda: bool(nodes.group._members[1].link.loss))
    assert nodes.group.gather(is_stopped=lambda: False) == "" and nodes.group.num_nodes == 2
    nodes.close()


def test_a_size_that_is_refused_is_left_out_if_another_one_was_good(elastic: Nodes3, tmp_path: Path) -> None:
    counts = elastic.group.counts
    assert not counts.leave_out(3)  # the first attempt: the job has an error
    counts.accept(3)
    assert not counts.leave_out(3)  # it worked before on as many
    elastic.replacements = {3: elastic.member(3)}
    assert elastic.group.gather(is_stopped=lambda: False) == "" and elastic.group.num_nodes == 4
    assert counts.leave_out(4)
    assert elastic.group.gather(is_stopped=lambda: False) == "" and elastic.group.num_nodes == 3
