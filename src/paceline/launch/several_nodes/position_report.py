"""The reports of a member about its silent ranks, with which the head finds the rank that the others wait for."""

import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from paceline.launch.failures.rank_observer import RankObserver
from paceline.launch.several_nodes.node_messages import RankPositions, as_message
from paceline.nodes.node_link import NodeLink

_MAX_SILENCE_SECONDS = 3.0


class PositionReport:
    """The observer of a member's ranks in one attempt. It sends nothing as long as they train."""

    def __init__(self, link: NodeLink, *, attempt: int, folder: Path) -> None:
        self._link = link
        self._attempt = attempt
        self._observer = RankObserver(folder)
        self._host = socket.gethostname()

    def send_if_silent(self, pids: Mapping[int, int]) -> None:
        """Send what the ranks do, whose processes are `pids`, if one of them is silent. May be called often."""
        if not self._observer.update(pids) or not self._observer.has_silent_ranks(pids):
            return
        if self._link.silence_seconds > _MAX_SILENCE_SECONDS:
            return  # the head would get all of it at once, and late
        seen = [replace(p, host=self._host) for p in self._observer.positions(pids)]
        self._link.send(as_message(RankPositions(attempt=self._attempt, positions=tuple(seen))))
