"""Run a program in virtual time: each rank runs its actions in order, and waits for messages and for `Costs.ready`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.schedule.program import Action, Op, Program
from paceline.schedule.timeline import Span

PerStage = float | Sequence[float]  # one value for all stages, or one for each stage
FinishedAction = tuple[int, int, float, float]  # rank, index in the rank's actions, start and stop in seconds
# receiving rank, sending rank, whether it is an activation (else a gradient), sending stage, microbatch
_MessageKey = tuple[int, int | None, bool, int, int]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The seconds of each operation: one value for all stages, or one for each stage.

    `backward` is B, and defaults to `backward_input + backward_weight`. A message occupies its link for `transfer`
    seconds and arrives `latency` seconds later. `transfer[s]` is for messages between stages s and s + 1. There is one
    link per ordered pair of ranks. `ready` is the earliest time at which a compute of a stage can begin.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    backward: PerStage | None = None
    update: PerStage = 0.0
    transfer: PerStage = 0.0
    latency: float = 0.0
    ready: PerStage = 0.0

    def seconds(self, action: Action) -> float:
        """Return the seconds of a compute action."""
        if action.op is Op.FORWARD:
            return value_for_stage(self.forward, action.stage)
        if action.op is Op.BACKWARD and self.backward is not None:
            return value_for_stage(self.backward, action.stage)
        by_op = {
            Op.BACKWARD_INPUT: self.backward_input,
            Op.BACKWARD_WEIGHT: self.backward_weight,
            Op.UPDATE: self.update,
        }
        parts = (by_op[action.op],) if action.op in by_op else (self.backward_input, self.backward_weight)
        return sum(value_for_stage(part, action.stage) for part in parts)


@dataclass(frozen=True, kw_only=True)
class WalkResult:
    """The result of running a program in virtual time.

    `finished` has each rank's actions in order of time, but is not sorted by time over the ranks. `num_finished[rank]`
    is the number of actions that the rank finished, and `end_times[rank]` is when it finished the last one.
    """

    program: Program
    finished: tuple[FinishedAction, ...]
    num_finished: tuple[int, ...]
    end_times: tuple[float, ...]

    @property
    def is_complete(self) -> bool:
        """Return True if every rank finished all its actions."""
        return all(
            num_finished == len(row) for num_finished, row in zip(self.num_finished, self.program.actions, strict=True)
        )

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Return the finished actions as spans."""
        return tuple(
            Span(rank=rank, action=self.program.actions[rank][index], start=start, stop=stop)
            for rank, index, start, stop in self.finished
        )


def walk_actions(program: Program, *, costs: Costs) -> WalkResult:
    """Run a program in virtual time until no rank can continue. An invalid program may end before all its actions."""
    walk = _ProgramWalk(program, costs)
    while walk.advance():
        pass
    return WalkResult(
        program=program,
        finished=tuple(walk.finished),
        num_finished=tuple(walk.num_finished),
        end_times=tuple(walk.times),
    )


class _ProgramWalk:
    """The state of `walk_actions`. Keys of messages are tuples, not `Message` objects, because tuples are faster."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program = program
        self.costs = costs
        self.finished: list[FinishedAction] = []
        self.num_finished = [0] * program.num_ranks  # actions, by rank
        self.times = [0.0] * program.num_ranks  # by rank: when it finished its last action
        self.ready_time, self.transfer_seconds = _lookup(costs.ready), _lookup(costs.transfer)
        self.compute_seconds: dict[tuple[Op, int], float] = {}  # by operation and stage
        self.arrival_times: dict[_MessageKey, float] = {}
        self.link_free_times: dict[tuple[int, int | None], float] = {}  # by sending and receiving rank

    def advance(self) -> bool:
        """Advance each rank as far as possible, and return True if any rank advanced."""
        num_before = sum(self.num_finished)
        for rank, row in enumerate(self.program.actions):
            self._advance_rank(rank, row)
        return sum(self.num_finished) > num_before

    def _advance_rank(self, rank: int, row: Sequence[Action]) -> None:
        index, now, finished = self.num_finished[rank], self.times[rank], self.finished
        while index < len(row):
            action, start = row[index], now
            op = action.op
            if op is _SEND_F or op is _SEND_B:
                self._send(rank, action, now)
            elif op is _RECV_F or op is _RECV_B:
                stage = action.stage - 1 if op is _RECV_F else action.stage + 1
                arrival = self.arrival_times.get((rank, action.peer, op is _RECV_F, stage, action.microbatch))
                if arrival is None:
                    break
                now = max(now, arrival)
            else:
                start = max(now, self.ready_time(action.stage))
                now = start + self._compute_seconds(action)
            finished.append((rank, index, start, now))
            index += 1
        self.num_finished[rank], self.times[rank] = index, now

    def _send(self, rank: int, action: Action, now: float) -> None:
        peer, is_activation = action.peer, action.op is _SEND_F
        earlier_stage = action.stage if is_activation else action.stage - 1
        link = (rank, peer)
        departure = max(now, self.link_free_times.get(link, 0.0)) + self.transfer_seconds(earlier_stage)
        self.link_free_times[link] = departure
        if peer is not None:
            self.arrival_times[peer, rank, is_activation, action.stage, action.microbatch] = (
                departure + self.costs.latency
            )

    def _compute_seconds(self, action: Action) -> float:
        key = (action.op, action.stage)
        seconds = self.compute_seconds.get(key)
        if seconds is None:
            seconds = self.compute_seconds[key] = self.costs.seconds(action)
        return seconds


_SEND_F, _SEND_B, _RECV_F, _RECV_B = Op.SEND_F, Op.SEND_B, Op.RECV_F, Op.RECV_B


def _lookup(value: PerStage) -> Callable[[int], float]:
    """Return a function from a stage to its value. It is faster than `value_for_stage`."""
    return value.__getitem__ if isinstance(value, Sequence) else lambda _: value


def value_for_stage(value: PerStage, stage: int) -> float:
    """Return the value for a stage: an element of the sequence, or the one value for all stages."""
    return value[stage] if isinstance(value, Sequence) else value
