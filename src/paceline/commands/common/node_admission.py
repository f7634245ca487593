"""The admission of nodes to a run: the head examines each node that comes, before the start and while the run lasts."""

import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from paceline.config.settings import Nodes
from paceline.console.output import print_line
from paceline.errors import ExitCode, MachineError, PacelineError, Problems, UsageError, list_problems
from paceline.launch.several_nodes.node_group import Member
from paceline.nodes.examination import RUN, Examination, examine_seats
from paceline.nodes.finding import Finding
from paceline.nodes.line_channel import LineChannel
from paceline.nodes.machine_facts import MachineFacts
from paceline.nodes.node_link import NodeLink
from paceline.nodes.node_meeting import Arrival, Reception, end_member
from paceline.nodes.node_place import NodePlace

STOPPED_WAITING, HEAD_STOPPED = "stopped while waiting for the other nodes", "node 0 was stopped"
_POLL_SECONDS = 0.2
_END_SECONDS = 2.0  # for an examination that is cut off


class NodeAdmission:
    """The admission by the head, whose own facts are `facts`.

    `admit_first` admits the nodes with which the run starts. After `open_again`, threads examine the nodes that come
    later, while the run lasts, and `take` returns those that may take part.
    """

    def __init__(
        self, listener: socket.socket, place: NodePlace, facts: MachineFacts, *, run_folder: Path, settings: Nodes
    ) -> None:
        self._reception = Reception(listener, place)
        self._place = place
        self._facts = facts
        self._run_folder = run_folder
        self._settings = settings
        self._newcomers: SimpleQueue[dict[int, Member]] = SimpleQueue()
        self._closed = threading.Event()
        self._examined: list[LineChannel] = []
        self._print_lock = threading.Lock()
        self._printed: set[tuple[str, str]] = set()  # the kinds of trouble with the machine, or "" for a note

    def admit_first(self) -> dict[int, Member]:
        """Wait for the nodes, and return them by their number.

        Raises:
            MachineError, UsageError: a node did not come, or the nodes can't train together. Then all are ended.
        """
        try:
            seats, findings = self._reception.wait(
                wait_seconds=self._settings.wait, report=print_meeting_line, last_call_seconds=self._settings.last_call
            )
        except KeyboardInterrupt:
            print_meeting_line(STOPPED_WAITING)
            self._reception.turn_away(HEAD_STOPPED, exit_code=int(ExitCode.INTERRUPTED), seconds=0)
            raise
        return self._admit(seats, findings)

    def open_again(self) -> None:
        """Admit further nodes from now on, if there is a place for them."""
        self._reception.open_again()
        threading.Thread(target=self._admit_newcomers, name="paceline-admission", daemon=True).start()

    def take(self) -> dict[int, Member]:
        """Return the nodes that were admitted since the last call, by their number."""
        members: dict[int, Member] = {}
        with suppress(Empty):
            while True:
                members |= self._newcomers.get_nowait()
        return members

    def vacate(self, channel: LineChannel) -> None:
        """Free the place of the node with this channel, which is lost."""
        self._reception.vacate(channel)

    def close(self, exit_code: int = int(ExitCode.FAILED), text: str = "node 0 has ended") -> None:
        """Admit no more nodes, and end those that wait for a place; `take` still returns those admitted before."""
        if not self._closed.is_set():
            self._reception.dismiss_spares(text, exit_code=exit_code)
        self._closed.set()
        self._reception.close()
        for channel in list(self._examined):
            channel.close()
        deadline = time.monotonic() + _END_SECONDS
        while self._examined and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 10)

    def _admit_newcomers(self) -> None:
        while not self._closed.is_set():
            seats, findings = self._reception.next_arrivals(seconds=_POLL_SECONDS)
            for finding in findings:
                print_meeting_line(f"sent away: {finding.what}" + (f" ({finding.hint})" if finding.hint else ""))
            for node, seat in seats.items():  # a node that is slow, or does not fit, is no harm to another one
                threading.Thread(
                    target=self._admit_newcomer, args=(node, seat), name="paceline-examination", daemon=True
                ).start()

    def _admit_newcomer(self, node: int, seat: Arrival) -> None:
        self._examined.append(seat.channel)
        try:
            self._newcomers.put(self._admit({node: seat}))
        except PacelineError as error:
            if not self._closed.is_set():
                print_meeting_line(f"not admitted: {error_line(error)}")
        except OSError as error:
            print_meeting_line(f"not admitted: {seat.hello.host} has gone ({error})")
            self._reception.vacate(seat.channel)
        finally:
            self._examined.remove(seat.channel)

    def _admit(self, seats: Mapping[int, Arrival], findings: Sequence[Finding] = ()) -> dict[int, Member]:
        """Examine nodes that have come, and return them as members of the run.

        Raises:
            MachineError, UsageError: they can't train with this node, or `findings` say so. They are ended.
        """
        examination = examine_seats(
            seats,
            self._facts,
            findings=findings,
            run_folder=self._run_folder,
            num_nodes=self._place.num_nodes,
        )
        refusals = [finding for finding in examination.findings if finding.refusal_code]
        if refusals:
            error = _refusal_error(refusals)
            text = f"node 0 refuses: {error_line(error)}"
            for node, arrival in seats.items():
                end_member(arrival.channel, node=node, exit_code=int(error.exit_code), text=text)
                self._reception.vacate(arrival.channel)
            raise error
        with self._print_lock:
            new_findings = self._new_findings(examination)
        for finding in new_findings:
            print_meeting_line(f"{'note' if finding.is_note else 'warning'}: {finding.what} ({finding.hint})")
        head = examination.host_names[0]
        for node, arrival in seats.items():
            with suppress(OSError):  # the link then says that the node is lost
                arrival.channel.send({"do": RUN, "node": node, "head": head})
        return {node: Member(host=seat.hello.host, link=NodeLink(seat.channel)) for node, seat in seats.items()}

    def _new_findings(self, examination: Examination) -> list[Finding]:
        """Return the findings that were not printed before: a note once, a trouble of a machine once for each machine.

        This node is examined again with each node that comes later.
        """
        new: list[Finding] = []
        machine_of = {node: f"{facts.host} {facts.address}" for node, facts in examination.facts.items()}
        for finding in examination.findings:
            machines = {""} if finding.is_note else {machine_of[node] for node in finding.nodes if node in machine_of}
            troubles = {(finding.kind, machine) for machine in machines} if finding.kind else set()
            if not troubles or troubles - self._printed:
                new.append(finding)
            self._printed |= troubles
        return new


def _refusal_error(refusals: Sequence[Finding]) -> PacelineError:
    """Return one error for all reasons why the nodes can't train together."""
    kind = UsageError if all(finding.refusal_code == ExitCode.REFUSED for finding in refusals) else MachineError
    errors = [kind(f"{finding.what}.", hint=finding.hint) for finding in refusals]
    return errors[0] if len(errors) == 1 else Problems(errors)


def error_line(error: PacelineError) -> str:
    """Return an error, or several at once, on one line."""
    problems = list_problems(error)
    return "; ".join(problem.what + (f" To do: {problem.hint}" if problem.hint else "") for problem in problems)


def print_meeting_line(line: str) -> None:
    """Print a line about the meeting of the nodes."""
    print_line(line, sys.stderr)
