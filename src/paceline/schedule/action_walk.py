"""A walk through a program as the runtime would run it: each rank in order, sends posted, receives waited for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.schedule.program import Action, Op, Program
from paceline.schedule.timeline import Span

PerStage = float | Sequence[float]
Done = tuple[int, int, float, float]
_Key = tuple[int, int | None, bool, int, int]  # receiver, sender, is an activation, the stage that made it, microbatch


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The seconds of each operation: one value for all stages or one per stage.

    `backward` defaults to `input + weight`. A message occupies its link for `transfer` seconds (one link per ordered
    pair of ranks; `transfer[s]` is for messages between stages s and s + 1) and arrives `latency` seconds later. No
    compute of a stage begins before `ready`.
    """

    forward: PerStage = 1.0
    input: PerStage = 1.0
    weight: PerStage = 1.0
    backward: PerStage | None = None
    update: PerStage = 0.0
    transfer: PerStage = 0.0
    latency: float = 0.0
    ready: PerStage = 0.0

    def seconds(self, action: Action) -> float:
        """Return the seconds of a compute."""
        if action.op is Op.FORWARD:
            return of_stage(self.forward, action.stage)
        if action.op is Op.BACKWARD and self.backward is not None:
            return of_stage(self.backward, action.stage)
        alone = {Op.INPUT: self.input, Op.WEIGHT: self.weight, Op.UPDATE: self.update}
        parts = (alone[action.op],) if action.op in alone else (self.input, self.weight)
        return sum(of_stage(part, action.stage) for part in parts)


@dataclass(frozen=True, kw_only=True)
class WalkResult:
    """The result of a walk: (rank, place in its line, start, stop) of each action, in the order they were done.

    `reached[rank]` is the first action that was not done, or the length of the line if all were; `ends[rank]` is the
    time at which the rank got there.
    """

    program: Program
    done: tuple[Done, ...]
    reached: tuple[int, ...]
    ends: tuple[float, ...]

    @property
    def is_whole(self) -> bool:
        """Return True if every rank reached the end of its line."""
        return all(reached == len(row) for reached, row in zip(self.reached, self.program.actions, strict=True))

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Return the actions that were done as spans."""
        lines = self.program.actions
        return tuple(
            Span(rank=rank, action=lines[rank][place], start=start, stop=stop) for rank, place, start, stop in self.done
        )


def walk_actions(program: Program, *, costs: Costs) -> WalkResult:
    """Run all actions that can run, in any program, even an invalid one."""
    walk = _Walk(program, costs)
    while walk.advances():
        pass
    return WalkResult(program=program, done=tuple(walk.done), reached=tuple(walk.reached), ends=tuple(walk.now))


class _Walk:
    """The state of a walk. Messages are keyed by plain tuples, as many ranks have hundreds of thousands of them."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program = program
        self.costs = costs
        self.done: list[Done] = []
        self.reached = [0] * program.num_ranks
        self.now = [0.0] * program.num_ranks
        self.ready, self.transfer = _lookup(costs.ready), _lookup(costs.transfer)
        self.seconds: dict[tuple[Op, int], float] = {}
        self.arrives: dict[_Key, float] = {}
        self.link_is_free: dict[tuple[int, int | None], float] = {}

    def advances(self) -> bool:
        """Advance each rank as far as possible, and return whether any rank advanced."""
        before = sum(self.reached)
        for rank, row in enumerate(self.program.actions):
            self._advance(rank, row)
        return sum(self.reached) > before

    def _advance(self, rank: int, row: Sequence[Action]) -> None:
        place, now, done = self.reached[rank], self.now[rank], self.done
        while place < len(row):
            action, start = row[place], now
            op = action.op
            if op is _SEND_F or op is _SEND_B:
                self._post(rank, action, now)
            elif op is _RECV_F or op is _RECV_B:
                stage = action.stage - 1 if op is _RECV_F else action.stage + 1
                arrival = self.arrives.get((rank, action.peer, op is _RECV_F, stage, action.microbatch))
                if arrival is None:
                    break
                now = max(now, arrival)
            else:
                start = max(now, self.ready(action.stage))
                now = start + self._seconds(action)
            done.append((rank, place, start, now))
            place += 1
        self.reached[rank], self.now[rank] = place, now

    def _post(self, rank: int, action: Action, now: float) -> None:
        peer, forward = action.peer, action.op is _SEND_F
        border = action.stage if forward else action.stage - 1
        link = (rank, peer)
        leaves = max(now, self.link_is_free.get(link, 0.0)) + self.transfer(border)
        self.link_is_free[link] = leaves
        if peer is not None:
            self.arrives[peer, rank, forward, action.stage, action.microbatch] = leaves + self.costs.latency

    def _seconds(self, action: Action) -> float:
        key = (action.op, action.stage)
        found = self.seconds.get(key)
        if found is None:
            found = self.seconds[key] = self.costs.seconds(action)
        return found


_SEND_F, _SEND_B, _RECV_F, _RECV_B = Op.SEND_F, Op.SEND_B, Op.RECV_F, Op.RECV_B


def _lookup(value: PerStage) -> Callable[[int], float]:
    return value.__getitem__ if isinstance(value, Sequence) else lambda _: value


def of_stage(value: PerStage, stage: int) -> float:
    """Return the value for a stage."""
    return value[stage] if isinstance(value, Sequence) else value
