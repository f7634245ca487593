"""The start of a training on several nodes, by the same command on each of them.

The command of node 0, the head, waits for the others, compares the nodes, and then trains as on one machine, with a
`NodeGroup`. The command of any other node answers the head, and then runs its part of each attempt.
"""

import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from paceline.commands.command_table import TrainOptions
from paceline.commands.common.node_admission import (
    HEAD_STOPPED,
    STOPPED_WAITING,
    NodeAdmission,
    error_line,
    print_meeting_line,
)
from paceline.config.merge_settings import as_command_text, merge_without_job
from paceline.config.secret_settings import mask_value
from paceline.config.task import Task
from paceline.console.output import print_line
from paceline.errors import ExitCode, MachineError, PacelineError
from paceline.launch.inherited_environment import leave_launcher
from paceline.launch.several_nodes.member_agent import MemberAgent, MemberEnd
from paceline.launch.several_nodes.node_group import NodeGroup
from paceline.launch.several_nodes.node_stays import describe_ranks
from paceline.launch.several_nodes.stopped_wait import StoppedWaitError, stop_ends_wait
from paceline.nodes.examination import END, answer_head
from paceline.nodes.head_connection import UNKNOWN_HOST_SECONDS, RunOverError, join_head
from paceline.nodes.line_channel import LineChannel
from paceline.nodes.machine_facts import RUN_FOLDER_OPTION, MachineFacts, code_files, read_machine_facts
from paceline.nodes.network_interfaces import interface_address
from paceline.nodes.node_link import NodeLink
from paceline.nodes.node_meeting import Reception, listen_as_head
from paceline.nodes.node_place import DEFAULT_PORT, NodePlace, has_late_names, node_place
from paceline.nodes.rank_hints import hint_for_nodes
from paceline.run_folder.run_folder import ROOT, find_run

_JOIN_SECONDS = 10.0  # for a node that only says why it can't take part
_TURN_AWAY_SECONDS = 3.0
_OWN_SETTINGS = ("nodes.interface",)  # settings that may differ between nodes
_ELASTIC_RESTARTS = 20  # after lost nodes, if the number of nodes may change and `nodes.restarts` is not set


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
    text = error_line(error)
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
    """The start on this node. `task` has the options and settings that all nodes should have in common.

    `node_counts` has the numbers of nodes that fit the layout, the largest first. `resume` is the run to resume, as for
    `choose_run`. `resume_command` is for the screen of a node whose head does not come back.
    """

    def __init__(
        self,
        place: NodePlace,
        task: Task,
        *,
        node_counts: tuple[int, ...],
        resume: str | None = None,
        resume_command: str = "",
    ) -> None:
        self._counts = place.counts  # as typed
        least = node_counts[-1] if place.is_elastic else place.least_nodes
        self._place = replace(place, least_nodes=least)
        self._task = task
        self.settings = merge_without_job(task.settings).nodes
        self._node_counts = node_counts
        self._resume_command = resume_command
        self._ranks_per_node = task.ranks // place.num_nodes
        default_restarts = _ELASTIC_RESTARTS if place.is_elastic else 0
        self._max_restarts = default_restarts if self.settings.restarts is None else self.settings.restarts
        self._run_options = _run_options(task, resume)
        self._run_folder = Path(self._run_options.get(RUN_FOLDER_OPTION, ROOT))
        self._listener: socket.socket | None = None

    def check_interface(self) -> None:
        """Check that this machine has the interface `nodes.interface`.

        Raises:
            UsageError: it does not. The other nodes end with the same error.
        """
        try:
            if self.settings.interface:
                interface_address(self.settings.interface)
        except PacelineError as error:
            tell_head(self._place, error)
            raise

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
        try:
            return self._run_member()
        except RunOverError as over:
            return over.exit_code, f"the run has ended, and this node was not needed: {over}"
        except KeyboardInterrupt:  # before the agent handles the signals
            print_meeting_line(STOPPED_WAITING)
            raise

    def _run_member(self) -> tuple[int, str]:
        place, num_restarts = self._place, 0
        host_seconds = math.inf if has_late_names(os.environ) else UNKNOWN_HOST_SECONDS
        end = self._take_part(place, self._join(place, host_seconds=host_seconds))
        while end.is_head_lost and num_restarts < self._max_restarts:
            place, num_restarts = replace(place, node=end.node), num_restarts + 1
            try:
                with stop_ends_wait():  # before the line, after which a user may stop the wait
                    print_meeting_line(f"{end.text}; waiting for it (restart {num_restarts} of {self._max_restarts})")
                    end = self._come_again(place, end)
            except StoppedWaitError:
                text = f"{end.text}; asked to stop while waiting for it"
                end = replace(end, exit_code=int(ExitCode.STOPPED), text=text, is_head_lost=False)
        return end.exit_code, end.text if end.node is None else f"node {end.node}: {end.text}"

    def _come_again(self, place: NodePlace, end: MemberEnd) -> MemberEnd:
        """Wait for the lost head, and take part again; `end` tells how this node lost it."""
        try:
            channel = self._join(place, has_met=True)
        except MachineError as error:  # a lost head is a reason to start again, as for the head a lost node is
            text = f"{end.text}, and did not come back: {error.what}"
            if self._resume_command:
                text += f"\nResume: {self._resume_command}"
            return replace(end, exit_code=int(ExitCode.STOPPED), text=text, is_head_lost=False)
        return self._take_part(place, channel)

    def _join(self, place: NodePlace, *, host_seconds: float = math.inf, has_met: bool = False) -> LineChannel:
        return join_head(
            place,
            wait_seconds=self.settings.wait,
            host_seconds=host_seconds,
            waits_for_place=self._max_restarts > 0,
            has_met=has_met,
            report=print_meeting_line,
        )

    def _take_part(self, place: NodePlace, channel: LineChannel) -> MemberEnd:
        """Take part until the head ends this node, or is lost."""
        try:
            message = answer_head(channel, place, read_facts=self._read_facts, run_folder=self._run_folder)
            node = message["node"]
            if message["do"] == END:
                return MemberEnd(node=node, exit_code=int(message["exit_code"]), text=str(message["text"]))
            head = str(message["head"])
            first = node * self._ranks_per_node
            ranks = describe_ranks(range(first, first + self._ranks_per_node))
            which = (
                f"{place.min_nodes} to {place.num_nodes}" if place.is_elastic else f"{place.num_nodes}, with {ranks}"
            )
            print_line(f"node {node} of {which}; the screen of node 0 ({head}) shows the training")
            agent = MemberAgent(
                NodeLink(channel),
                node=node,
                head=head,
                ranks_per_node=self._ranks_per_node,
                settings=self.settings,
                may_leave=place.is_elastic,
            )
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
        facts = self._read_facts()
        admission = NodeAdmission(
            self._listener, self._place, facts, run_folder=self._run_folder, settings=self.settings
        )
        try:
            group = NodeGroup(
                admission.admit_first(),
                own_host=facts.host,
                interface_address=interface_address(self.settings.interface) if self.settings.interface else "",
                ranks_per_node=self._ranks_per_node,
                node_counts=self._node_counts,
                settings=self.settings,
                max_restarts=self._max_restarts,
                admission=admission,
            )
            if self._max_restarts or self._place.is_elastic:
                admission.open_again()
            try:
                yield group
            except PacelineError as error:
                error.hint = hint_for_nodes(error.hint, nodes=self._place.option)
                group.end(int(error.exit_code), f"node 0: {error_line(error)}")
                raise
            except KeyboardInterrupt:
                print_meeting_line("stopped")
                group.end(int(ExitCode.INTERRUPTED), HEAD_STOPPED)
                raise
            finally:
                group.end(int(ExitCode.FAILED), "node 0 has ended")  # unless it has ended them already
        finally:
            admission.close()

    def _read_facts(self) -> MachineFacts:
        return read_machine_facts(
            head_host=self._place.head_host,
            run_folder=self._run_folder,
            code=code_files(self._task.job),
            data={},
            command=self._command(),
            verb="paceline train",
        )

    def _command(self) -> dict[str, str]:
        """Return the options and settings of the command by their names, without those that may differ."""
        task = self._task
        options = {
            "job": task.job, "layout": task.layout, "update": task.update, "compress": task.compress,
            "device": task.device, "ranks per node": str(self._ranks_per_node), **self._run_options,
            "nodes": self._counts,
        }  # fmt: skip
        settings = {
            name: mask_value(name, as_command_text(value))
            for name, value in task.settings.items()
            if name not in _OWN_SETTINGS
        }
        return {**options, **settings}


def _run_options(task: Task, resume: str | None) -> dict[str, str]:
    """Return the options that choose the run: its folder, if they name it, and what else is resumed.

    `--resume RUN` is the same as `--run-dir RUN`, unless a checkpoint is named.

    Raises:
        UsageError: there is no such run or checkpoint.
    """
    named = {RUN_FOLDER_OPTION: task.run} if task.run else {}
    if resume is None:
        return named
    if resume and "://" not in resume:
        origin, checkpoint = find_run(resume)
        is_same = not task.run or Path(task.run).resolve() == origin.path.resolve()
        if is_same:
            named = {RUN_FOLDER_OPTION: task.run or str(origin.path)}
            return named if checkpoint is None else {**named, "resume": checkpoint.name}
    return {**named, "resume": resume or "the newest run"}
