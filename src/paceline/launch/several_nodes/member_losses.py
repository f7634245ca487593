"""The members that a head loses during an attempt, and whether they show that the head itself is cut off."""

import errno
import os
import time
from dataclasses import dataclass, replace

from paceline.errors import ExitCode
from paceline.launch.failures.failure_record import LOST_NODE, Failure
from paceline.nodes.node_link import NodeLink

HEAD_GIVEN_UP = "it has given up node 0"
"""The beginning of the reason of a member that no longer hears the head."""
_UNREACHABLE = {os.strerror(code) for code in (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT)}
_MIN_MEMBERS = 2  # with one member, either of the two nodes may be the one that is cut off


@dataclass(frozen=True, kw_only=True)
class MemberLoss:
    """The loss of a member. `silent_seconds` is for how long nothing had come from it."""

    name: str
    address: str
    silent_seconds: float
    monotonic_seconds: float
    is_unreachable: bool
    """Whether the network explains the loss: nothing arrives any more, while the end of an agent would be noticed."""


class MemberLosses:
    """The losses of one attempt. Members that vanish within `patience` seconds of each other have a common cause."""

    def __init__(self, *, patience: float) -> None:
        self._patience = patience
        self._losses: list[MemberLoss] = []

    def clear(self) -> None:
        """Begin another attempt."""
        self._losses.clear()

    def add(self, name: str, link: NodeLink, *, reason: str) -> None:
        """Record the loss of a member, whose link is still open if the head gave it up."""
        is_silent = not link.loss and link.silence_seconds > self._patience
        self._losses.append(
            MemberLoss(
                name=name,
                address=link.channel.peer_address,
                silent_seconds=link.silence_seconds,
                monotonic_seconds=time.monotonic(),
                is_unreachable=is_silent or link.loss in _UNREACHABLE or reason.startswith(HEAD_GIVEN_UP),
            )
        )

    def blame_head(self, failure: Failure, *, head: str, host: str) -> Failure:
        """Return the failure that says that the head is cut off, or `failure` if the losses do not show it.

        No member may be left. `head` is the head's name and `host` its host.
        """
        times = [loss.monotonic_seconds for loss in self._losses]
        is_cut_off = len(times) >= _MIN_MEMBERS and all(loss.is_unreachable for loss in self._losses)
        if not is_cut_off or max(times) - min(times) > self._patience:
            return failure
        seconds = max(loss.silent_seconds for loss in self._losses)
        names = " and ".join(loss.name for loss in self._losses)
        message = f"{head} itself is probably cut off from the network: nothing for {seconds:.0f} s from {names}"
        ping = f"ping {self._losses[0].address}"
        hint = f"  check first, on node 0: its link (ip -br link), then the way to another node ({ping})"
        return replace(failure, rank=0, host=host, message=message, screen=f"{message}\n{hint}")


def lost_node_failure(message: str, *, rank: int, host: str, silent_seconds: float) -> Failure:
    """Return the failure of an attempt that lost a node, `rank` being the first one there."""
    return Failure(
        rank=rank,
        kind=LOST_NODE,
        message=message,
        screen=message,
        exit_code=int(ExitCode.STOPPED),
        monotonic_ns=time.monotonic_ns() - int(silent_seconds * 1e9),
        host=host,
    )
