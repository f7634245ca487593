"""The start of a training on several nodes, by the same command on each of them.

The command of node 0, the head, waits for the others, compares the nodes, and then trains as on one machine, with a
`NodeGroup`. The command of any other node answers the head, and then runs its part of each attempt.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from paceline.commands.command_table import TrainOptions
from paceline.config.merge_settings import as_command_text, merge_without_job
from paceline.config.secret_settings import mask_value
from paceline.config.task import Task
from paceline.console.output import print_line
from paceline.errors import ExitCode, MachineError, PacelineError, Problems, UsageError, list_problems
from paceline.launch.inherited_environment import leave_launcher
from paceline.launch.several_nodes.late_nodes import LateNodes
from paceline.launch.several_nodes.member_agent import MemberAgent, MemberEnd
from paceline.launch.several_nodes.node_group import Member, NodeGroup, describe_ranks
from paceline.nodes.examination import END, RUN, answer_head, examine_seats
from paceline.nodes.finding import Finding
from paceline.nodes.line_channel import LineChannel
from paceline.nodes.machine_facts import MachineFacts, code_files, read_machine_facts
from paceline.nodes.network_interfaces import interface_address
from paceline.nodes.node_link import NodeLink
from paceline.nodes.node_meeting import Arrival, Reception, end_member, join_head, listen_as_head
from paceline.nodes.node_place import DEFAULT_PORT, NodePlace, node_place
from paceline.run_folder.run_folder import ROOT

_JOIN_SECONDS = 10.0  # for a node that only says why it can't take part
_TURN_AWAY_SECONDS = 3.0
_OWN_SETTINGS = ("nodes.interface",)  # settings that may differ between nodes


def training_place(options: TrainOptions) -> NodePlace | None:
    """Return the place of this process among several nodes, for which it starts ranks; None if there is only this one.

    The process then is no rank of a launcher, whatever the launcher's variables say.

    Raises:
        UsageError: the options or the scheduler's variables can't be read.
    """
    if options.nodes is None and options.node is None and options.ranks_per_node is None:
        return None
    place = node_place(options.nodes, options.node, os.environ)
    if place is None:
        place = NodePlace(num_nodes=1, head_host="127.0.0.1", port=DEFAULT_PORT, node=0)
    leave_launcher(os.environ)
    return place


def tell_head(place: NodePlace, error: PacelineError) -> None:
    """Tell the other nodes that this one can't take part, so that they do not wait for it."""
    text = _describe(error)
    try:
        listener = listen_as_head(place)
        if listener is None:
            join_head(place, wait_seconds=_JOIN_SECONDS, problem=text).close()
            return
        reception = Reception(listener, place)
        reception.turn_away(f"node 0: {text}", exit_code=int(error.exit_code), seconds=_TURN_AWAY_SECONDS)
        reception.close()
    except PacelineError:  # the error of this node is the one to report
        return


class NodeStart:
    """The start on this node. `task` has the options and settings that all nodes should have in common."""

    def __init__(self, place: NodePlace, task: Task) -> None:
        self._place = place
        self._task = task
        self.settings = merge_without_job(task.settings).nodes
        self._ranks_per_node = task.ranks // place.num_nodes
        self._run_folder = Path(task.run) if task.run else ROOT
        self._listener: socket.socket | None = None
        self._channels: dict[int, LineChannel] = {}  # of the members of the run

    def is_head(self) -> bool:
        """Return whether this is the head, which then listens for the other nodes.

        Raises:
            MachineError, UsageError: this is node 0, but it can't be the head.
        """
        self._listener = listen_as_head(self._place)
        return self._listener is not None

    def run_member(self) -> tuple[int, str]:
        """Take part as a member; return the exit code and the text for the screen.

        After the loss of the head, the member comes again, up to `nodes.restarts` times.

        Raises:
            MachineError: the head can't be reached, refuses this node, or ended before the start.
        """
        place, num_restarts = self._place, 0
        end = self._take_part(place, self._join(place))
        while True:
            if not end.is_head_lost or num_restarts >= self.settings.restarts:
                return end.exit_code, end.text if end.node is None else f"node {end.node}: {end.text}"
            place, num_restarts = replace(place, node=end.node), num_restarts + 1
            print_line(f"{end.text}; waiting for it (restart {num_restarts} of {self.settings.restarts})", sys.stderr)
            try:
                channel = self._join(place)
            except MachineError as error:  # a lost head is a reason to start again, as for the head a lost node is
                return int(ExitCode.STOPPED), f"{end.text}, and did not come back: {error.what}"
            end = self._take_part(place, channel)

    def _join(self, place: NodePlace) -> LineChannel:
        waits_for_place = self.settings.restarts > 0
        return join_head(place, wait_seconds=self.settings.wait, waits_for_place=waits_for_place, report=_report)

    def _take_part(self, place: NodePlace, channel: LineChannel) -> MemberEnd:
        """Take part until the head ends this node, or is lost."""
        try:
            message = answer_head(channel, place, read_facts=self._read_facts, run_folder=self._run_folder)
            node = message["node"]
            if message["do"] == END:
                return MemberEnd(node=node, exit_code=int(message["exit_code"]), text=str(message["text"]))
            head = str(message["head"])
            ranks = describe_ranks(node, ranks_per_node=self._ranks_per_node)
            text = f"node {node} of {place.num_nodes}, with {ranks}; the screen of node 0 ({head}) shows the training"
            print_line(text)
            link = NodeLink(channel)
            agent = MemberAgent(link, node=node, head=head, ranks_per_node=self._ranks_per_node, settings=self.settings)
            return agent.run()
        finally:
            channel.close()

    @contextmanager
    def lead(self) -> Iterator[NodeGroup]:
        """Wait for the other nodes, compare them with this one, and give the group of them all.

        After the block, the members end with the exit code that `NodeGroup.end` got, or with that of the error.

        Raises:
            MachineError, UsageError: a node did not come, or the nodes can't train together.
        """
        assert self._listener is not None
        reception = Reception(self._listener, self._place)
        try:
            own_facts = self._read_facts()
            members = self._admit(reception, own_facts, wait_seconds=self.settings.wait)
            late = LateNodes(
                reception,
                admit=lambda seats: self._examine(reception, own_facts, seats, ()),
                places=self.settings.restarts,
                report=_report,
            )
            group = NodeGroup(
                members,
                own_host=own_facts.host,
                own_address=self._own_address(members),
                ranks_per_node=self._ranks_per_node,
                settings=self.settings,
                gather=lambda lost, is_stopped: self._gather(reception, own_facts, lost, is_stopped),
                late=late if self.settings.restarts else None,
            )
            try:
                yield group
            except PacelineError as error:
                group.end(int(error.exit_code), f"node 0: {_describe(error)}")
                raise
            finally:
                group.end(int(ExitCode.FAILED), "node 0 has ended")  # unless it has ended them already
        finally:
            reception.close()

    def _gather(
        self, reception: Reception, facts: MachineFacts, lost: Sequence[int], is_stopped: Callable[[], bool]
    ) -> tuple[Mapping[int, Member], str]:
        """Return the nodes that take the places of lost ones and, if there are too few of them, why."""
        for node in lost:
            reception.vacate(node)
        deadline = time.monotonic() + self.settings.wait
        while True:
            seconds = max(0.0, deadline - time.monotonic())
            try:
                return self._admit(reception, facts, wait_seconds=seconds, is_stopped=is_stopped), ""
            except PacelineError as error:
                if time.monotonic() >= deadline or is_stopped():
                    return {}, _describe(error)
                _report(f"not admitted, so still waiting: {_describe(error)}")

    def _admit(
        self,
        reception: Reception,
        facts: MachineFacts,
        *,
        wait_seconds: float,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> dict[int, Member]:
        """Wait for nodes, examine those that are new, and return them as members of the run.

        Raises:
            MachineError, UsageError: a node did not come, or the nodes can't train together. Those nodes are ended.
        """
        seats, findings = reception.wait(wait_seconds=wait_seconds, report=_report, is_stopped=is_stopped)
        return self._examine(reception, facts, seats, findings)

    def _examine(
        self, reception: Reception, facts: MachineFacts, seats: Mapping[int, Arrival], findings: Sequence[Finding]
    ) -> dict[int, Member]:
        """Examine those of the nodes that are new, and return them as members of the run.

        Raises:
            MachineError, UsageError: the nodes can't train together. Those that are new are ended.
        """
        new = {node: seat for node, seat in seats.items() if self._channels.get(node) is not seat.channel}
        if not new and not findings:
            return {}
        examination = examine_seats(
            new, facts, findings=findings, run_folder=self._run_folder, num_nodes=self._place.num_nodes
        )
        refusals = [finding for finding in examination.findings if finding.refusal_code]
        if refusals:
            error = _refusal_error(refusals)
            for node, arrival in new.items():
                end_member(
                    arrival.channel,
                    node=node,
                    exit_code=int(error.exit_code),
                    text=f"node 0 refuses: {_describe(error)}",
                )
                reception.vacate(node)
            raise error
        for finding in examination.findings:
            print_line(f"{'note' if finding.is_note else 'warning'}: {finding.what} ({finding.hint})", sys.stderr)
        for node, arrival in new.items():
            with suppress(OSError):  # the link then says that the node is lost
                arrival.channel.send({"do": RUN, "node": node, "head": facts.host})
            self._channels[node] = arrival.channel
        return {node: Member(host=arrival.hello.host, link=NodeLink(arrival.channel)) for node, arrival in new.items()}

    def _own_address(self, members: Mapping[int, Member]) -> str:
        """Return the address at which rank 0 listens: that of `nodes.interface`, or the one that the members reach."""
        if self.settings.interface:
            return interface_address(self.settings.interface)
        return next(iter(members.values())).link.own_address

    def _read_facts(self) -> MachineFacts:
        return read_machine_facts(
            head_host=self._place.head_host,
            run_folder=self._run_folder,
            code=code_files(self._task.job),
            data={},
            command=self._command(),
        )

    def _command(self) -> dict[str, str]:
        """Return the options and settings of the command by their names, without those that may differ."""
        task = self._task
        options = {
            "job": task.job, "layout": task.layout, "update": task.update, "compress": task.compress,
            "device": task.device, "ranks per node": str(self._ranks_per_node), "run folder": task.run,
        }  # fmt: skip
        settings = {
            name: mask_value(name, as_command_text(value))
            for name, value in task.settings.items()
            if name not in _OWN_SETTINGS
        }
        return {**options, **settings}


def _refusal_error(refusals: Sequence[Finding]) -> PacelineError:
    """Return one error for all reasons why the nodes can't train together."""
    kind = UsageError if all(finding.refusal_code == ExitCode.REFUSED for finding in refusals) else MachineError
    errors = [kind(f"{finding.what}.", hint=finding.hint) for finding in refusals]
    return errors[0] if len(errors) == 1 else Problems(errors)


def _describe(error: PacelineError) -> str:
    """Return an error, or several at once, on one line."""
    problems = list_problems(error)
    return "; ".join(problem.what + (f" To do: {problem.hint}" if problem.hint else "") for problem in problems)


def _report(line: str) -> None:
    print_line(line, sys.stderr)
