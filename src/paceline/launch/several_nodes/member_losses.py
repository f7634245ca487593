"""The members that a head loses during an attempt, and whether they show that the head itself is cut off."""

import errno
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.console.formatting import join_words
from paceline.errors import ExitCode
from paceline.launch.failures.failure_record import LOST_NODE, Failure
from paceline.launch.several_nodes.node_stays import NodeNames
from paceline.nodes.node_link import NodeLink

HEAD_GIVEN_UP = "it has given up node 0"
"""The beginning of the reason of a member that no longer hears the head."""
_UNREACHABLE = {os.strerror(code) for code in (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT)}
_MIN_MEMBERS = 2  # with one member, either of the two nodes may be the one that is cut off


@dataclass(frozen=True, kw_only=True)
class MemberLoss:
    """The loss of a member. `silent_seconds` is for how long nothing had come from it."""

    name: str
    reason: str
    address: str
    silent_seconds: float
    monotonic_seconds: float
    is_unreachable: bool
    """Whether the network explains the loss: nothing arrives any more, while the end of an agent would be noticed."""

    @property
    def message(self) -> str:
        """The loss as a sentence."""
        return f"{self.name} is gone: {self.reason}"


class MemberLosses:
    """The losses of one attempt. Members that vanish within `patience` seconds of each other have a common cause."""

    def __init__(self, *, patience: float, names: NodeNames) -> None:
        self._patience = patience
        self._names = names
        self._losses: list[MemberLoss] = []

    def clear(self) -> None:
        """Begin another attempt."""
        self._losses.clear()

    def add(self, name: str, link: NodeLink, *, reason: str) -> str:
        """Record the loss of a member, and return it as a sentence. Its link is still open if the head gave it up."""
        is_silent = not link.loss and link.silence_seconds > self._patience
        loss = MemberLoss(
            name=name,
            reason=reason,
            address=link.channel.peer_address,
            silent_seconds=link.silence_seconds,
            monotonic_seconds=time.monotonic(),
            is_unreachable=is_silent or link.loss in _UNREACHABLE or reason.startswith(HEAD_GIVEN_UP),
        )
        self._losses.append(loss)
        return loss.message

    def explain(self, first: Failure, failures: Iterable[Failure | None], *, head: str, is_alone: bool) -> Failure:
        """Return the first loss with all others that ended the attempt, or the failure that says the head is cut off.

        `failures` are those of all nodes. `head` is the head's name; it is alone if no member is left.
        """
        ranks = {failure.message: failure.rank for failure in failures if failure is not None}
        losses = sorted((loss for loss in self._losses if loss.message in ranks), key=lambda loss: ranks[loss.message])
        if len(losses) > 1:
            message = _joined_message(losses)
            said = {**first.said, "lost_nodes": [loss.name for loss in losses]}
            first = replace(first, message=message, screen=message, said=said)
        return self._blame_head(first, head=head) if is_alone else first

    def _blame_head(self, failure: Failure, *, head: str) -> Failure:
        """Return the failure that says that the head is cut off, or `failure` if the losses do not show it."""
        times = [loss.monotonic_seconds for loss in self._losses]
        is_cut_off = len(times) >= _MIN_MEMBERS and all(loss.is_unreachable for loss in self._losses)
        if not is_cut_off or max(times) - min(times) > self._patience:
            return failure
        seconds = max(loss.silent_seconds for loss in self._losses)
        names = join_words([loss.name for loss in self._losses])
        message = f"{head} itself is probably cut off from the network: nothing for {seconds:.0f} s from {names}"
        ping = f"ping {self._losses[0].address}"
        hint = f"  check first, on node 0: its link (ip -br link), then the way to another node ({ping})"
        return replace(failure, rank=0, host=self._names[0], message=message, screen=f"{message}\n{hint}")


def _joined_message(losses: Sequence[MemberLoss]) -> str:
    """Return a sentence about several losses, in which nodes with the same reason are together."""
    names: dict[str, list[str]] = {}
    for loss in losses:
        names.setdefault(loss.reason, []).append(loss.name)
    return "; ".join(
        f"{join_words(some)} {'is' if len(some) == 1 else 'are'} gone: {reason}" for reason, some in names.items()
    )


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
