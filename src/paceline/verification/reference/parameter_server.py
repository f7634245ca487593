"""A replay of a parameter server's run by one process: each share on the version it was computed on, in the same order.

It is the reference of `--update ps` with a staleness above 0, written naively: it keeps the whole model after every
update. It uses only the record of the run: which share, which versions, in which order.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.comm.process_group import LaunchInfo, WorkerEntrance, World
from paceline.console.formatting import plural
from paceline.step.parameter_server.parameter_server_step import ServerStep
from paceline.step.parameter_server.pushed_gradients import AppliedUpdate
from paceline.step.parameter_server.transport import reach_store
from paceline.trainer.parameter_server_worker import compute_shares
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.trainer.setup.prepare import PreparedJob
from paceline.verification.compare_evaluation import evaluated_by, judge_evaluation
from paceline.verification.compare_in_lockstep import Say
from paceline.verification.compare_independent_runs import (
    WeightDrift,
    first_batches,
    judge_drift,
    kept_by,
    of_layout,
    state_dict_tensors,
)
from paceline.verification.noise_floor import can_disturb, disturb_reference
from paceline.verification.precision import build_in_precision
from paceline.verification.reference.float64_mode import in_double
from paceline.verification.reference.loss_terms import counts_of_part
from paceline.verification.reference.reference import Reference, RunPosition
from paceline.verification.rung_result import RungResult

_ERRAND = "paceline-verify/errand/{}"
_OVER, _DOUBLE, _OWN = "over", "float64", "own"
_POLL_SECONDS = 0.05
_START = RunPosition(step=0, epoch=0, position=0)


class WorkerInstructions:
    """The instructions to workers on what to build for each rung; the first server gives them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._number = 0

    def next(self, dtype: torch.dtype | None) -> World:
        """Return the servers' world for the next rung, which workers join again."""
        self._say(_DOUBLE if dtype is torch.float64 else _OWN)
        entrance = self._world.entrance
        assert entrance is not None
        return replace(self._world, entrance=replace(entrance, session=str(self._number)))

    def end(self) -> None:
        """Tell the workers that no rung follows."""
        self._say(_OVER)

    def _say(self, what: str) -> None:
        self._number += 1
        if self._world.entrance is not None and self._world.is_main:
            store = reach_store(self._world.entrance.place, timeout_seconds=self._world.timeout_seconds)
            store.set(_ERRAND.format(self._number), what)


def run_errands(ready: PreparedJob, place: LaunchInfo) -> int:
    """Run a worker's side of `verify`: build the same model as the servers in each rung, and compute its shares."""
    store = reach_store(place, timeout_seconds=ready.settings.train.timeout_seconds)
    number = 0
    while True:
        number, what = told_next(store, after=number)
        if what == _OVER:
            return 0
        dtype = torch.float64 if what == _DOUBLE else None
        with in_double(active=dtype is not None):
            built = build_in_precision(ready, World.alone(), dtype)
            compute_shares(ready, built, WorkerEntrance(place=place, session=str(number)))
            built.close()


def told_next(store: Store, *, after: int) -> tuple[int, str]:
    """Return the first server's newest instruction and its number; a server that has ended counts as over.

    A restarted worker also finds instructions of earlier rungs, which are closed, and skips them.
    """
    number = after + 1
    try:
        while not store.check([_ERRAND.format(number)]):
            time.sleep(_POLL_SECONDS)
        while store.check([_ERRAND.format(number + 1)]):
            number += 1
        return number, store.get(_ERRAND.format(number)).decode()
    except RuntimeError:
        return number, _OVER


class ServedReference(Reference):
    """The one-process run of a record."""

    counts_of = staticmethod(counts_of_part)
    server_of: Mapping[str, int] = MappingProxyType({})
    """The server of each parameter; parameters that are not named belong to the first."""

    def with_spec(self, **changes: Any) -> "ServedReference":
        """Return the same run from its start, with changes to its `ReferenceConfig`."""
        plain = super().with_spec(**changes)
        other = ServedReference(job=plain.job, spec=plain.spec, cast=plain.cast)
        other.server_of = self.server_of
        return other

    def replay(self, record: Sequence[AppliedUpdate], *, backwards: bool) -> float:
        """Replay the record and return the loss of the last share. `backwards` adds microbatches in reverse order."""
        history, places, left = [self._now()], [_START], dict[int, int]()
        loss = float("nan")
        for applied in record:
            share = applied.share
            while len(places) <= share.step:
                places.append(self.after(places[-1], sum(len(piece.samples) for piece in self.pieces(places[-1]))))
            pieces = self.pieces(places[share.step])
            mine = list(range(share.number, len(pieces), share.of))
            if applied.counts:
                loss = self._one(applied, [pieces[i] for i in mine], mine, history, places[share.step], backwards)
            left[share.step] = left.get(share.step, share.of) - 1
            for schedule in self.schedules if not left[share.step] else ():
                schedule.step()
        return loss

    def _one(
        self,
        applied: AppliedUpdate,
        pieces: Sequence[Any],
        mine: Sequence[int],
        history: list[dict[str, Tensor]],
        at: RunPosition,
        backwards: bool,
    ) -> float:
        names, server_of = history[-1], self.server_of
        self._put({name: history[applied.versions[server_of.get(name, 0)]][name] for name in names})
        gradient = self.gradient(at, pieces=pieces, backwards=backwards, stream=lambda place: mine[place])
        self._put(history[-1])
        kept, self.schedules = self.schedules, []
        self.update(gradient.total)
        self.schedules = kept
        history.append(self._now())
        return gradient.loss

    def _now(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def _put(self, version: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(version[name])


def _disturbed(reference: ServedReference, record: Sequence[AppliedUpdate], seed: int) -> dict[str, Tensor]:
    other = reference.again()
    assert isinstance(other, ServedReference)
    if can_disturb(other, at=_START, seed=seed):
        disturb_reference(other, seed=seed)
    other.replay(record, backwards=True)
    return kept_by(other)


def server_of_parameters(built: TrainingSetup) -> dict[str, int]:
    """Return the server that holds each parameter."""
    parts = {name: built.kept.parts(name) for name in built.kept.names}
    return {name: next((n for n, part in enumerate(each) if part.numel), 0) for name, each in parts.items()}


def run_served(built: TrainingSetup, *, reference: Reference | None, steps: int, say: Say) -> RungResult:
    """Run freely, then replay the run; the drift of a disturbed replay is the floor."""
    rung_result, step = RungResult(), built.step
    assert isinstance(step, ServerStep)
    step.record = []
    say(plural(steps, "step"))
    results = [step.run(given) for given in first_batches(built, steps, {})]
    step.settle()
    evaluated, weights, kept = evaluated_by(built), of_layout(built), state_dict_tensors(built)
    if isinstance(reference, ServedReference):
        reference.server_of = server_of_parameters(built)
        start = {name: tensor.clone() for name, tensor in kept_by(reference).items()}
        loss = reference.replay(step.record, backwards=False)
        again = partial(_disturbed, reference, step.record)
        judge_drift(rung_result, weights, reference, again, start, steps, WeightDrift())
        late = max((number for counts in step.lateness() for number, _ in counts["late"]), default=0)
        rung_result.detail = (
            f"{plural(len(step.record), 'update')}, at most {late} late, repeated in their order; loss of the last "
            f"batch {results[-1].loss:.6g}, of the last share {loss:.6g}."
        )
        if evaluated is not None:
            judge_evaluation(rung_result, built, reference, evaluated, steps, kept)
    found: RungResult = RungResult(**built.world.share_json(vars(rung_result)))
    return found
