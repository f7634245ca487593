"""The second rung: compare the layout with one process step by step, each time from equal weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.loader import BatchLoader
from paceline.data.order.cursor import Cursor
from paceline.data.stream.iterable_loader import checksum
from paceline.data.types import StepInput
from paceline.errors import DesyncError, JobError
from paceline.parallel.module_access.tensor_access import copy_into
from paceline.step.step_totals import StepResult
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.trainer.setup.job_data import cut_for, feed_for
from paceline.verification.compare_step import StepComparison
from paceline.verification.diagnosis.local_gradients import can_replay, microbatch_gradients, own_gradients
from paceline.verification.diagnosis.module_outputs import first_apart, watch_layout
from paceline.verification.diagnosis.observed_step import ObservedStep
from paceline.verification.diagnosis.rank_names import RankNames
from paceline.verification.diagnosis.rerun import linear_view
from paceline.verification.gather_copies import broadcast_tensor, differing_parts, gather_all_copies
from paceline.verification.reference.dropout_isolation import without_dropout
from paceline.verification.reference.reference import Reference, RunPosition
from paceline.verification.reference.sample_reader import num_rows
from paceline.verification.rung_result import DIFFERENT, RungResult

Say = Callable[[str], None]


class Lockstep:
    """A lockstep comparison that runs on every rank; rank 0 holds the reference and judges."""

    def __init__(self, *, built: TrainingSetup, reference: Reference | None, say: Say) -> None:
        self._built = built
        self._world = built.world
        self._reference = reference
        self._say = say
        self._last: Mapping[str, Tensor] = {}
        self._moved: dict[str, bool] = {}  # for parameters with a gradient: whether the rate was ever above 0
        self._has_stepped = self._has_moved = self._was_zero = False
        self.rung_result = RungResult()

    def run(self, cursors: Sequence[Cursor]) -> RungResult:
        """Compare one step at each cursor."""
        self._compare_start()
        for done, cursor in enumerate(cursors, 1):
            at = RunPosition(step=cursor.step, epoch=cursor.epoch, position=cursor.position)
            last = ", the epoch's short last batch" if at.number > done else ""
            self._say(f"step {at.number}{last} ({done} of the {len(cursors)} that are compared)")
            self._step(cursor, at)
            if self._world.share_json(self.rung_result.first_difference is not None):
                break
        if self._reference is not None and self.rung_result.first_difference is None:
            self.rung_result.leave_out(self._untested(self._reference, steps=len(cursors)))
        found: RungResult = RungResult(**self._world.share_json(vars(self.rung_result)))
        return found

    def _untested(self, reference: Reference, *, steps: int) -> str:
        """Return what the compared steps did not test."""
        if not self._has_stepped:
            return "gradients and weights: no compared step has a finite gradient in one process"
        moved = self._moved if self._has_moved else dict.fromkeys(self._moved, False)
        rated = reference.rated()
        rises = self._was_zero and any(rated[name] for name, has in moved.items() if not has)
        return unmoved_weights_note(moved, steps=steps, rises=rises)

    def _compare_start(self) -> None:
        """Compare the initial weights and buffers on every rank."""
        wanted = {} if self._reference is None else _state(self._reference.model)
        found = differing_parts(self._mine(), wanted, holding=self._built.weights, world=self._world)
        for name, far in found.items() if self._reference is not None else ():
            self.rung_result.note(DIFFERENT, difference=max(far.values()))
            self.rung_result.blame(step=1, parameter=name, cause=self._unequal(name, list(far)))
            return

    def _unequal(self, name: str, ranks: Sequence[int]) -> str:
        """Return the likely cause of a tensor that differs from the one that one process built."""
        here = ", ".join(map(str, ranks))
        if name not in self._built.weights.parameters:
            return (
                f"unequal initial buffers on rank {here}: a forward before the first step (used to plan a layout) "
                "has written to it, or the build is not repeatable"
            )
        again = "the build is not repeatable" if 0 in ranks else "not built from the same seed, nor broadcast"
        return f"unequal initial weights on rank {here}: {again}"

    def _step(self, cursor: Cursor, at: RunPosition) -> None:
        self._take_over()
        try:
            given = self._given(cursor)
        except DesyncError as error:  # on every rank
            self.rung_result.blame(step=at.number, parameter="(data)", cause=f"data order: {error.what.rstrip('.')}")
            return
        self._built.step.steps_done = cursor.step
        judge, before = None, []
        if self._reference is not None:
            before = self._reference.statistics()
            places = RankNames(mesh=self._built.worlds.mesh, holding=self._built.kept)
            judge = StepComparison(
                reference=self._reference, at=at, rung_result=self.rung_result, last=self._last, places=places
            )
        self._see(given, judge)
        if self._world.share_json(judge is not None and judge.wants_quiet):
            self._see_quiet(given, judge)
        right = {} if judge is None else judge.right
        if self._world.share_json(judge is None or judge.is_finite):
            self._update(right, judge, cursor.step)
            self._last = right
        elif self._reference is not None:
            self._reference.skip(before)

    def _see(self, given: StepInput, judge: StepComparison | None) -> None:
        model = self._built.model
        model.train()
        result = self._built.step.gradients(given)
        self._check_counts(result)
        read = [[m.index, list(m.indices), checksum(m.data, 0), num_rows(m.data)] for m in given.micro]
        rows = self._read(read)
        losses = self._world.gather_json(result.loss)
        gradients = self._gradients()
        buffers = self._buffers()
        if judge is not None:
            seen = ObservedStep(
                gradients=gradients,
                buffers=buffers,
                losses=losses,
                ran=[index for index, _, _, _ in rows],
                samples={index: samples for index, samples, _, _ in rows},
                contents={index: content for index, _, content, _ in rows},
                rows={index: number for index, _, _, number in rows},
                replicas=self._built.worlds.data.world_size,
            )
            judge.see(seen)
        self._see_own(given, judge, gradients)
        self._see_forward(given, judge)

    def _read(self, mine: list[Any]) -> list[Any]:
        """Return the microbatches that every replica read; report ranks of one replica that read different ones."""
        found: dict[int, list[Any]] = {}
        for rank, (replica, rows) in enumerate(self._world.gather_json([self._built.worlds.data.rank, mine])):
            if found.setdefault(replica, rows) != rows:
                cause = f"data order: rank {rank} read different samples than the other ranks of replica {replica}"
                self.rung_result.blame(step=self._built.step.steps_done + 1, parameter="(data)", cause=cause)
        return [row for rows in found.values() for row in rows]

    def _check_counts(self, result: StepResult) -> None:
        """Report counts that `train` refuses, since they explain the gradient; every rank has the same counts."""
        try:
            result.reduced.check_counts()
        except JobError as error:
            self.rung_result.blame(
                step=self._built.step.steps_done + 1, parameter="(count)", cause=error.what.rstrip(".")
            )

    def _see_own(
        self, given: StepInput, judge: StepComparison | None, gradients: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Compute gradients that nothing explains yet on each rank alone."""
        names, known = self._world.share_json(None if judge is None else (judge.unexplained, judge.known)) or ((), None)
        if not names or not can_replay(self._built):
            return
        self._take_over()
        mine = own_gradients(self._built, given, names=names, known=known)
        if not all(self._world.gather_json(mine is not None)) or mine is None:
            return
        targets = {m.name: m.parameter for m in self._built.named}
        size = sum(linear_view(targets[name]).numel() for name in names)
        own = microbatch_gradients(self._built, mine, num_micro=given.num_micro, size=size)
        if judge is not None:
            judge.see_own(own, gradients, replicas=self._world.world_size)

    def _see_forward(self, given: StepInput, judge: StepComparison | None) -> None:
        """Find where the forward first differs, if nothing explains it yet and the forward is cut or recomputed."""
        plan, worlds = self._built.plan, self._built.worlds
        remat = plan.asked.remat != "none"
        asks = self._world.share_json(judge is not None and bool(judge.unexplained))
        if not asks or not (remat or set(worlds.mesh.split) - {"dp_replicate"}):
            return
        first = min(worlds.data.world_size, given.num_micro)
        right = None if judge is None else judge.watched(first)
        self._take_over()
        mine = watch_layout(self._built, given, microbatches=first)
        found = first_apart(self._built, mine, right)
        if judge is not None:
            judge.see_forward(found, remat=remat)

    def _see_quiet(self, given: StepInput, judge: StepComparison | None) -> None:
        """Run the step again on both sides with every dropout rate at zero."""
        models = [*self._built.models] if self._reference is None else [*self._built.models, self._reference.model]
        with without_dropout(models):
            self._take_over()
            self._built.step.gradients(given)
            gradients = self._gradients()
            if judge is not None:
                judge.see_quiet(gradients)
        self._take_over()

    def _gradients(self) -> list[dict[str, Tensor]]:
        named, scaler = self._built.named, self._built.update.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        mine = {m.name: m.parameter.grad.detach() / scale for m in named if m.parameter.grad is not None}
        return gather_all_copies(mine, holding=self._built.kept, world=self._world)

    def _buffers(self) -> list[dict[str, Tensor]]:
        names = [name for name, _ in self._built.model.named_buffers()]
        mine = {name: tensor for name, tensor in self._mine().items() if name in names}
        return gather_all_copies(mine, holding=self._built.weights, world=self._world, names=names)

    def _mine(self) -> dict[str, Tensor]:
        """Return this rank's part of every parameter and buffer."""
        held = self._built.weights.mine.values()
        return {one.name: one.tensor for one in held if one.tensor is not None}

    def _take_over(self) -> None:
        """Give every rank the reference's weights and buffers."""
        source = {} if self._reference is None else _state(self._reference.model)
        with torch.no_grad():
            for name, held in self._built.weights.mine.items():
                value = broadcast_tensor(name, source.get(name), holding=self._built.weights, world=self._world)
                if held.tensor is not None and value is not None:
                    copy_into(held.tensor, value)
        self._built.step.replica.buffers.begin()  # this copy, not a forward, wrote the buffers

    def _given(self, cursor: Cursor) -> StepInput:
        feed = feed_of(self._built, cursor)
        try:
            return next(iter(feed))
        finally:
            feed.close()

    def _update(self, right: Mapping[str, Tensor], judge: StepComparison | None, step: int) -> None:
        """Apply the same gradient in both optimizers; then the weights must be equal on every rank."""
        names = set(self._world.share_json(sorted(right)))
        kept, weights = self._built.kept, self._built.weights
        before = (
            {} if self._reference is None else {n: t.detach().clone() for n, t in _state(self._reference.model).items()}
        )
        values = {
            name: broadcast_tensor(name, right.get(name), holding=kept, world=self._world)
            for name in kept.names
            if name in names
        }
        for member in self._built.named:
            member.parameter.grad = values.get(member.name)
        scaler, self._built.update.scaler = self._built.update.scaler, None  # this gradient is not scaled
        norm, _ = self._built.update.commit(step=step + 1, loss=0.0)
        self._built.update.scaler = scaler
        norms = self._world.gather_json(None if norm is None else float(norm))
        everybody = gather_all_copies(self._mine(), holding=weights, world=self._world, names=kept.names)
        if self._reference is None or judge is None:
            return
        rated, self._has_stepped = self._reference.rated(), True
        self._was_zero = not all(rated.values())
        self._reference.update(right)
        for name, value in self._reference.weights().items():
            if name in right and bool(right[name].any()):
                self._moved[name] = self._moved.get(name, False) or rated[name]
                self._has_moved = self._has_moved or not torch.equal(value, before[name])
        judge.norms(norms)
        places = RankNames(mesh=self._built.worlds.mesh, holding=weights)
        for copy, after in enumerate(everybody):
            changed = {n: t for n, t in after.items() if copy == 0 or t is not everybody[0][n]}
            where = f", on rank {copy}" if copy else ""
            judge.update(before=before, after=changed, where=where, weights=places, copy=copy)


def unmoved_weights_note(moved: Mapping[str, bool], *, steps: int, rises: bool) -> str:
    """Return a note about weights that have a gradient but did not move, so that their update was not tested.

    A few may stay because of rounding (a gradient near zero), so the note needs all of them unmoved, or a rate of 0.
    `rises`: the rate of some was 0 and is above 0 in the next step.
    """
    still = [name for name, has in moved.items() if not has]
    if not still:
        return ""
    who = "the weights" if len(still) == len(moved) else f"{len(still)} of {len(moved)} weights ({still[0]} first)"
    more = f". Hint: --steps {2 * steps}, because the learning rate is above 0 after these steps" if rises else ""
    return f"{who}: no step changed them (the learning rate is 0 or too small), so their update was not tested{more}"


def feed_of(built: TrainingSetup, cursor: Cursor) -> BatchLoader:
    """Return the layout's own loader, starting at `cursor`."""
    settings = built.settings
    return feed_for(
        built.data,
        settings,
        cut=cut_for(built.plan, settings, built.worlds.data),
        cursor=cursor,
        sample_seeds=settings.data.sample_seeds,
        shards=settings.data.shards,
        agree=built.world.gather_json,
    )


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
