"""Walk through a program as its runtime would: each rank in order, sends posted, receives waited for."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.schedule.program import Action, Message, Op, Program
from paceline.schedule.timeline import Span

PerStage = float | Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of each operation, the same for all stages or one for each; `backward` is `input + weight` if not given.

    A message takes `transfer` seconds of its link (one link per ordered pair of ranks; `transfer[s]` is for what passes
    between stages s and s + 1) and is there `latency` seconds later.
    """

    forward: PerStage = 1.0
    input: PerStage = 1.0
    weight: PerStage = 1.0
    backward: PerStage | None = None
    update: PerStage = 0.0
    transfer: PerStage = 0.0
    latency: float = 0.0

    def seconds(self, action: Action) -> float:
        """Of a compute."""
        if action.op is Op.FORWARD:
            return _at(self.forward, action.stage)
        if action.op is Op.BACKWARD and self.backward is not None:
            return _at(self.backward, action.stage)
        alone = {Op.INPUT: self.input, Op.WEIGHT: self.weight, Op.UPDATE: self.update}
        parts = (alone[action.op],) if action.op in alone else (self.input, self.weight)
        return sum(_at(part, action.stage) for part in parts)

    def transfer_seconds(self, message: Message) -> float:
        """How long a message occupies its link."""
        return _at(self.transfer, message.stage if message.kind is Op.FORWARD else message.stage - 1)


@dataclass(frozen=True, kw_only=True)
class Followed:
    """How it went; `reached[rank]` is the first action that was not done, past the end where all were."""

    spans: tuple[Span, ...]
    reached: tuple[int, ...]


def follow(program: Program, *, costs: Costs) -> Followed:
    """Do everything that can be done, in any program, however broken."""
    walk = _Walk(program, costs)
    while walk.goes_on():
        pass
    return Followed(spans=tuple(walk.spans), reached=tuple(walk.reached))


class _Walk:
    def __init__(self, program: Program, costs: Costs) -> None:
        self.program = program
        self.costs = costs
        self.spans: list[Span] = []
        self.reached = [0] * program.num_ranks
        self.now = [0.0] * program.num_ranks
        self.arrives: dict[tuple[int, int | None, Message], float] = {}
        self.link_is_free: dict[tuple[int, int | None], float] = {}

    def goes_on(self) -> bool:
        """Each rank as far as it comes; whether any came further."""
        before = sum(self.reached)
        for rank, row in enumerate(self.program.actions):
            while self.reached[rank] < len(row) and self._does(rank, row[self.reached[rank]]):
                self.reached[rank] += 1
        return sum(self.reached) > before

    def _does(self, rank: int, action: Action) -> bool:
        start = stop = self.now[rank]
        if action.op.is_send:
            self._post(rank, action)
        elif action.op.is_receive:
            arrival = self.arrives.get((rank, action.peer, action.message))
            if arrival is None:
                return False
            stop = max(start, arrival)
        else:
            stop = start + self.costs.seconds(action)
        self.now[rank] = stop
        self.spans.append(Span(rank=rank, action=action, start=start, stop=stop))
        return True

    def _post(self, rank: int, action: Action) -> None:
        link = (rank, action.peer)
        leaves = max(self.now[rank], self.link_is_free.get(link, 0.0)) + self.costs.transfer_seconds(action.message)
        self.link_is_free[link] = leaves
        if action.peer is not None:
            self.arrives[action.peer, rank, action.message] = leaves + self.costs.latency


def _at(value: PerStage, stage: int) -> float:
    return value[stage] if isinstance(value, Sequence) else value
