"""The agent of a node that is not the head: it runs its part of each attempt, and watches the link to the head."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from paceline.checkpoint.files.peers.peer_checkpoint import parse_plan
from paceline.config.settings import Nodes
from paceline.console.output import print_line
from paceline.errors import ExitCode, PacelineError
from paceline.filesystem.atomic_files import write_json
from paceline.launch.agent.forkserver_client import MEMORY_FOLDER, ForkserverClient
from paceline.launch.agent.stop_requests import StopRequests
from paceline.launch.agent.supervisor import Supervisor
from paceline.launch.failures.failure_record import FIRST_FAILURE, Failure, failure_from_exception
from paceline.launch.launch_environment import launch_environ
from paceline.launch.several_nodes.attempt_part import AttemptPart
from paceline.launch.several_nodes.attempt_progress import AttemptProgress, read_progress
from paceline.launch.several_nodes.broken_links import BrokenLink, find_broken_links
from paceline.launch.several_nodes.member_losses import HEAD_GIVEN_UP, lost_node_failure
from paceline.launch.several_nodes.node_memory import NodeMemory
from paceline.launch.several_nodes.node_messages import (
    EndNode,
    EndPart,
    HeadMessage,
    NodeLeaves,
    NodeLeft,
    StartPart,
    as_message,
    part_ended,
)
from paceline.launch.several_nodes.node_stays import describe_ranks
from paceline.launch.several_nodes.position_report import PositionReport
from paceline.nodes.network_interfaces import interface_address
from paceline.nodes.node_link import NodeLink, SilenceWatch
from paceline.run_folder.run_folder import RunFolder

_POLL_SECONDS = 0.02
_STOP_SECONDS = 5.0  # for the head to end all nodes after a stop


@dataclass(frozen=True, kw_only=True)
class MemberEnd:
    """The end of a member. `node` is its number; None if it had none yet."""

    node: int | None
    exit_code: int
    text: str
    is_head_lost: bool = False
    """Whether the node may come again, because the head is gone and nobody asked this node to stop."""


class MemberAgent:
    """The agent of a member. `run` returns how the head has ended it, or that the head is gone.

    With `may_leave`, a stop request is only for this node: its ranks save with all others, which then continue.
    """

    def __init__(
        self, link: NodeLink, *, node: int, head: str, ranks_per_node: int, settings: Nodes, may_leave: bool = False
    ) -> None:
        self._link = link
        self._node = node
        self._head = head
        self._ranks_per_node = ranks_per_node
        self._settings = settings
        self._stop_requests = StopRequests()
        self._forkserver: ForkserverClient | None = None
        self._end: MemberEnd | None = None
        self._silence = SilenceWatch(settings.patience)
        self._idle_since = time.monotonic()  # the end of the last attempt
        self._may_leave = may_leave
        self._has_said_that_it_leaves = False
        self._memory = NodeMemory()
        self._last_step = 0  # of earlier attempts

    def run(self) -> MemberEnd:
        """Run the parts of attempts that the head starts, until it ends this node or is gone."""
        try:
            with self._stop_requests.listening():
                while self._end is None:
                    is_over = bool(self._link.loss)  # before the messages that arrived until then
                    message = self._next_message()
                    if isinstance(message, StartPart):
                        self._run_part(message)
                    elif message is None:
                        self._end_if_stopped()
                        if is_over or not self._link.loss:
                            self._watch_head()
                        time.sleep(_POLL_SECONDS)
            return self._end
        finally:
            if self._forkserver is not None:
                self._forkserver.close()
            self._memory.close()
            self._link.close()

    def _end_if_stopped(self) -> None:
        """End this node between two attempts if it was asked to stop, and the head does not end it soon.

        The head then sees that it is gone.
        """
        count = self._stop_requests.count
        is_overdue = time.monotonic() - self._idle_since > _STOP_SECONDS or count > 1 or self._may_leave
        self._say_that_it_leaves()
        if count and is_overdue and self._end is None:
            code = ExitCode.STOPPED if count == 1 else ExitCode.INTERRUPTED
            text = "asked to stop" if self._may_leave else "stopped between two attempts"
            self._end = MemberEnd(node=self._node, exit_code=int(code), text=text)
            self._link.send(as_message(NodeLeft(reason="it was asked to stop")))

    def _say_that_it_leaves(self) -> None:
        """Tell the head that this node was asked to stop, if the others may continue without it."""
        if self._may_leave and self._stop_requests.count and not self._has_said_that_it_leaves:
            self._has_said_that_it_leaves = True
            self._link.send(as_message(NodeLeaves()))

    def _next_message(self) -> HeadMessage | None:
        """Return the next message; the one that ends this node is kept, too. What is no message is left out."""
        while (value := self._link.next_message()) is not None:
            try:
                message: HeadMessage = msgspec.convert(value, HeadMessage)
            except msgspec.ValidationError:
                continue
            if isinstance(message, EndNode):
                self._end = MemberEnd(
                    node=self._node,
                    exit_code=message.exit_code,
                    text=message.text,
                    is_head_lost=message.may_return and not self._stop_requests.count,
                )
            return message
        return None

    def _watch_head(self) -> None:
        """End this node if the head is gone, and say so if it is silent."""
        seconds = self._link.silence_seconds
        reason = ""
        if self._link.loss:
            reason = "its agent has ended, or the connection to it was lost"
        elif self._silence.is_gone(seconds):
            reason = f"nothing for {seconds:.0f} s"
            farewell = f"{HEAD_GIVEN_UP}, from which nothing came for {seconds:.0f} s"
            self._link.send(as_message(NodeLeft(reason=farewell)))
        elif line := self._silence.news(f"node 0 ({self._head})", seconds):
            print_line(line, sys.stderr)
        if reason and self._end is None:
            text = f"node 0 ({self._head}) is gone: {reason}"
            self._end = MemberEnd(
                node=self._node,
                exit_code=int(ExitCode.STOPPED),
                text=text,
                is_head_lost=not self._stop_requests.count,
            )

    def _run_part(self, start: StartPart) -> None:
        """Run this node's part of an attempt, and send the head how it ended."""
        ranks = range(start.first_rank, start.first_rank + self._ranks_per_node)
        try:
            code, failure, progress = self._supervise(start, ranks)
        except (PacelineError, OSError) as error:  # for example, the folder can't be written
            failure = failure_from_exception(error, rank=ranks.start)
            code, progress = failure.exit_code, AttemptProgress()
        self._idle_since = time.monotonic()
        self._last_step = progress.last_step(before=self._last_step)
        ended = part_ended(
            start.attempt,
            exit_code=code,
            failure=failure,
            progress=progress,
            inventory=self._memory.inventory(),
            broken_links=self._find_broken_links(start, failure),
        )
        self._link.send(as_message(ended))

    def _find_broken_links(self, start: StartPart, failure: Failure | None) -> list[BrokenLink]:
        payload = start.request["payload"]
        folder, plan = RunFolder(Path(payload["run"])).attempt_folder(start.attempt), payload.get("peer_plan")
        return [] if plan is None else find_broken_links(folder, failure, own_node=self._node, nodes=plan["nodes"])

    def _supervise(self, start: StartPart, ranks: range) -> tuple[int, Failure | None, AttemptProgress]:
        """Return the exit code, the failure and the progress of this node's ranks."""
        request, own_address = start.request, self._own_address()
        peer_plan = request["payload"].get("peer_plan")
        plan = None if peer_plan is None else parse_plan(peer_plan)
        part = AttemptPart(
            ranks=ranks,
            address=start.address,
            port=start.port,
            own_address=own_address,
            node=self._node,
            memory_folder=self._memory.begin_attempt(node=self._node, host=own_address, plan=plan),
        )
        path = part.write_request(RunFolder(Path(request["payload"]["run"])), start.attempt, request)
        self._memory.announce(path.parent, node=self._node)
        if self._forkserver is None:
            environ = {**launch_environ(os.environ, exact=start.exact), MEMORY_FOLDER: self._memory.folder}
            self._forkserver = ForkserverClient(environ=environ)
        supervisor = Supervisor(
            forkserver=self._forkserver,
            request=path,
            ranks=ranks,
            stop_requests=self._stop_requests,
            watches_hangs=False,  # the head does
            sees_all_ranks=False,
        )
        report = PositionReport(self._link, attempt=start.attempt, folder=path.parent)
        code, failure = supervisor.run(self._head_watch(supervisor, start.attempt, path.parent, ranks, report))
        return code, failure, read_progress(path.parent, ranks)

    def _own_address(self) -> str:
        """Return the address of this node on the network of the ranks."""
        interface = self._settings.interface
        return interface_address(interface) if interface else self._link.own_address

    def _record_lost_head(self, folder: Path, ranks: range) -> None:
        """Write for `paceline why` that the head is gone, because the head itself can't. `ranks` are this node's."""
        path = folder / FIRST_FAILURE
        if self._end is None or not self._end.is_head_lost or path.exists():
            return
        name = describe_ranks(range(self._ranks_per_node))
        step = read_progress(folder, ranks).last_step(before=self._last_step)
        reason = self._end.text.partition(" is gone: ")[2] or self._end.text
        message = f"node 0 ({self._head}, {name}) is gone: {reason}; last step {step}"
        failure = replace(lost_node_failure(message, rank=0, host=self._head, silent_seconds=0.0), step=step)
        with suppress(OSError):
            write_json(path, asdict(failure))

    def _head_watch(
        self, supervisor: Supervisor, attempt: int, folder: Path, ranks: range, report: PositionReport
    ) -> Callable[[], None]:
        """Return the function that carries out, during an attempt, what the head asks for."""

        def watch() -> None:
            self._say_that_it_leaves()
            report.send_if_silent(supervisor.pids)
            is_over = bool(self._link.loss)
            while (message := self._next_message()) is not None:
                if isinstance(message, EndPart) and message.attempt == attempt:
                    supervisor.end_attempt()
            if is_over or not self._link.loss:
                self._watch_head()
            if self._end is not None:
                supervisor.end_attempt()
                self._record_lost_head(folder, ranks)

        return watch
