"""The messages between the head's agent and the others while a run lasts."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec

from paceline.launch.failures.failure_record import Failure
from paceline.launch.failures.rank_position import RankPosition
from paceline.launch.several_nodes.attempt_progress import AttemptProgress
from paceline.launch.several_nodes.broken_links import BrokenLink
from paceline.launch.several_nodes.node_memory import MemoryInventory


class StartPart(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="start"):
    """A message from the head: the node runs its part of an attempt. `request` is that of the head's own ranks."""

    attempt: int
    first_rank: int
    address: str
    """Where rank 0 listens."""
    port: int
    exact: bool
    request: dict[str, Any]


class EndPart(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="end_part"):
    """A message from the head: the node ends its ranks of this attempt at once."""

    attempt: int


class EndNode(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="end"):
    """A message from the head: the run is over."""

    node: int | None
    exit_code: int
    text: str
    may_return: bool = False
    """Whether the head has only given this node up, so that it may come again."""


class NodeLeaves(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="leaves"):
    """A message from a member: it was asked to stop, and the others may continue without it."""


class RankPositions(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="positions"):
    """A message from a member: what its ranks do, because one of them has sent no heartbeat for a while."""

    attempt: int
    positions: tuple[RankPosition, ...]

    def on_host(self, name: str) -> tuple[RankPosition, ...]:
        """Return the positions with the name by which the head knows the node."""
        return tuple(replace(position, host=name) for position in self.positions)


class NodeLeft(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="left"):
    """A message from a member: it ends, and why."""

    reason: str


class PartEnded(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="ended"):
    """A message from a member: no process of its part is left.

    A failure has its age instead of its time, because clocks differ between machines.
    """

    attempt: int
    exit_code: int
    progress: AttemptProgress
    failure: dict[str, Any] | None = None
    failure_age_seconds: float = 0.0
    inventory: MemoryInventory | None = None
    broken_links: tuple[BrokenLink, ...] = ()

    def read_failure(self, *, host: str) -> Failure | None:
        """Return the failure with its time on the clock of this machine.

        Raises:
            TypeError: these are not the fields of a failure.
        """
        if self.failure is None:
            return None
        monotonic_ns = time.monotonic_ns() - int(self.failure_age_seconds * 1e9)
        return Failure(**{**self.failure, "monotonic_ns": monotonic_ns, "host": host})


HeadMessage = StartPart | EndPart | EndNode


def part_ended(
    attempt: int,
    *,
    exit_code: int,
    failure: Failure | None,
    progress: AttemptProgress,
    inventory: MemoryInventory | None = None,
    broken_links: Sequence[BrokenLink] = (),
) -> PartEnded:
    """Return the message about the end of a member's part."""
    age_seconds = 0.0
    if failure is not None and failure.monotonic_ns:
        age_seconds = max(0.0, (time.monotonic_ns() - failure.monotonic_ns) / 1e9)
    return PartEnded(
        attempt=attempt,
        exit_code=exit_code,
        progress=progress,
        failure=None if failure is None else asdict(failure),
        failure_age_seconds=age_seconds,
        inventory=inventory,
        broken_links=tuple(broken_links),
    )


def as_message(value: msgspec.Struct) -> Mapping[str, Any]:
    """Return a message as JSON."""
    fields: Mapping[str, Any] = msgspec.to_builtins(value)
    return fields
