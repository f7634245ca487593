"""Comparison of one step on rank 0 with the reference: data, loss, gradients, buffers and update."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from paceline.parallel.batchnorm.norm_tape import norms_with_statistics
from paceline.verification.diagnosis.difference_location import of_copy, of_gradients, of_weights, worst_first
from paceline.verification.diagnosis.local_gradients import MOST_NAMES, flatten_gradients, replay_cause
from paceline.verification.diagnosis.module_outputs import ModuleOutputs, quiet_where, watch_reference, watched_cause
from paceline.verification.diagnosis.observed_step import ObservedStep, read_otherwise
from paceline.verification.diagnosis.placement_cause import GradientCase, placing_cause
from paceline.verification.diagnosis.rank_names import RankNames
from paceline.verification.diagnosis.rerun import ReferenceRerun, Tensors
from paceline.verification.diagnosis.update_cause import norm_cause, update_cause
from paceline.verification.reference.dropout_isolation import has_dropout
from paceline.verification.reference.reference import Reference, RunPosition
from paceline.verification.rung_result import DIFFERENT, RungResult, verdict_of_distance
from paceline.verification.tensor_distance import eps_of, euclidean_distance, euclidean_norm, to_double

_UNITS, _UNITS_OF_HALF = 64.0, 2.0  # units in the last place by which two updates from one gradient may differ


class StepComparison:
    """The comparison of a step: `see` judges what the layout did, `update` both optimizers' updates with `right`."""

    def __init__(
        self,
        *,
        reference: Reference,
        at: RunPosition,
        rung_result: RungResult,
        last: Tensors | None = None,
        places: RankNames | None = None,
    ) -> None:
        self._reference = reference
        self._places = places
        self._at = at
        self._rung_result = rung_result
        self._where = ""
        self._inquiry = ReferenceRerun(reference=reference, at=at, last=last or {}, places=places)
        self._losses: Sequence[float] = ()
        self._bad: Sequence[str] = ()

    @property
    def right(self) -> Tensors:
        """The reference's gradient."""
        return self._inquiry.gradient.total

    @property
    def is_finite(self) -> bool:
        """True if the gradient of one process is finite."""
        return all(bool(torch.isfinite(value).all()) for value in self.right.values())

    @property
    def wants_quiet(self) -> bool:
        """True if a second run without dropout would tell more."""
        return bool(self._inquiry.unexplained) and has_dropout(self._reference.model)

    def see(self, seen: ObservedStep) -> None:
        """Judge data, gradients, loss and buffers, and report the first that is wrong."""
        data = read_otherwise(seen, pieces=self._inquiry.pieces, places=self._places)
        if data is not None:
            self._rung_result.blame(step=self._at.number, parameter="(data)", cause=data)
        if not self.is_finite:
            self._see_nothing(seen.gradients)
            return
        empty = ", ".join(self._inquiry.gradient.empty)
        if empty:
            self._rung_result.detail += (
                f" Step {self._at.number} has no target of {empty}: train stops there, or skips the step "
                "(train.on_nonfinite)."
            )
        folded = {f"{name}." for name, _ in norms_with_statistics(self._reference.model)}
        kept = {name for name, _ in self._reference.model.named_buffers() if not name.startswith(tuple(folded))}
        self._losses = seen.losses
        self._see_buffers(seen.buffers, kept)  # judged before the gradients, because the forward may read them
        self._see_gradients(seen, is_data_right=data is None)
        self._see_losses(seen.losses)
        if self._inquiry.is_blurred:
            self._rung_result.leave_out(
                f"gradients of step {self._at.number} in half precision: rounding alone changes them there"
            )
        self._see_buffers(seen.buffers, {name for name, _ in self._reference.model.named_buffers()} - kept)

    def _see_nothing(self, everywhere: Sequence[Tensors]) -> None:
        """Report a rank with a finite gradient where one process has none (a count of 0, an overflow)."""
        for rank, parts in enumerate(everywhere):
            if all(bool(torch.isfinite(value).all()) for value in parts.values()):
                of = of_copy(next(iter(self.right)), rank, places=self._places)
                counts = self._inquiry.gradient.counts_in_words
                cause = f"finite on {of}, but not in one process ({counts})"
                self._rung_result.blame(step=self._at.number, parameter=next(iter(self.right)), cause=cause)
                return
        self._rung_result.detail += (
            f" Step {self._at.number} has no finite gradient in one process nor here "
            f"({self._inquiry.gradient.counts_in_words}): train.on_nonfinite decides."
        )

    @property
    def unexplained(self) -> list[str]:
        """The parameters to compute again on each rank alone, worst first."""
        return self._inquiry.unexplained[:MOST_NAMES]

    @property
    def known(self) -> dict[str, float] | None:
        """The global counts, if the job gives them before the forward."""
        return self._inquiry.known

    def see_own(
        self, own: Mapping[int, torch.Tensor], gradients: Sequence[Tensors], *, replicas: int | None = None
    ) -> None:
        """Decide from every rank's separately computed gradients whether the fault arose there or in the reduction."""
        names, first = self.unexplained, self._rung_result.first_difference
        like = dict(self._reference.model.named_parameters())
        found = (
            flatten_gradients({name: gradients[0].get(name) for name in names}, like) * self._inquiry.gradient.divisor
        )
        cause, who = replay_cause(self._inquiry, own, names=names, found=found, ranks=replicas or len(gradients))
        self._where = who and f"on {who}"
        if first is not None:
            share = f"{len(self._inquiry.unexplained)} of {len(self.right)} parameters"
            first["cause"] = f"{cause} ({share})"

    def watched(self, microbatches: int) -> ModuleOutputs:
        """Return the outputs of every module in one process."""
        return watch_reference(self._inquiry, model=self._reference.model, microbatches=microbatches)

    def see_forward(self, found: Mapping[str, Any] | None, *, remat: bool) -> None:
        """Report the first module whose output differs, or that none differs."""
        first = self._rung_result.first_difference
        if first is None or found is None:
            return
        floor = self._inquiry.floors.loss
        loss_wrong = any(not abs(loss - self._inquiry.gradient.loss) <= floor for loss in self._losses)
        last = next((name for name in reversed(list(self.right)) if name in self._bad), "")
        cause = watched_cause(found, places=self._places, loss_wrong=loss_wrong, remat=remat, last=last)
        self._where = quiet_where(found, places=self._places, loss_wrong=loss_wrong, remat=remat)
        first["cause"] = f"{cause} ({len(self._bad)} of {len(self.right)} parameters)"

    def see_quiet(self, gradients: Sequence[Tensors]) -> None:
        """Report random numbers as the cause if the gradients agree once both sides run without dropout."""
        quiet = self._inquiry.again().total
        apart = [
            name
            for parts in gradients
            for name in self._inquiry.unexplained
            if name in quiet
            and euclidean_distance(parts.get(name, torch.zeros_like(quiet[name])), quiet[name])
            > self._inquiry.floor(name)
        ]
        first = self._rung_result.first_difference
        if not apart and first is not None:
            first["cause"] = (
                "random streams: without dropout the gradients agree, so dropout draws different numbers than in one "
                f"process{self._where and ', ' + self._where} "
                f"({len(self._inquiry.unexplained)} of {len(self.right)} parameters)"
            )

    def norms(self, norms: Sequence[float | None]) -> None:
        """Compare the gradient norms that the ranks measured for clipping."""
        largest = math.hypot(*(euclidean_norm(value) for value in self.right.values()))
        shared = None if self._places is None else self._places.counted(self.right)
        cause = norm_cause(norms, largest, shared=shared)
        if cause is not None and self._reference.spec.max_grad_norm is not None:
            self._rung_result.blame(step=self._at.number, parameter="(gradient norm)", cause=cause)

    def update(
        self, *, before: Tensors, after: Tensors, where: str = "", weights: RankNames | None = None, copy: int = 0
    ) -> None:
        """Compare the weights after both optimizers applied the same gradient."""
        wanted = {name: p.detach() for name, p in self._reference.model.named_parameters()}
        bad: dict[str, float] = {}
        for name, weight in after.items():
            apart, moved = euclidean_distance(weight, wanted[name]), euclidean_distance(wanted[name], before[name])
            units = _UNITS_OF_HALF if weight.dtype.itemsize < 4 else _UNITS
            floor = units * eps_of(weight) * (euclidean_norm(wanted[name]) + moved)
            verdict = verdict_of_distance(apart, floor)
            self._rung_result.note(verdict, difference=apart, floor=floor)
            if verdict == DIFFERENT:
                bad[name] = apart / max(moved, 1e-300)
        self._rung_result.count("weights", len(after))
        if bad:
            name = max(bad, key=lambda key: bad[key])
            flat = {"before": before[name], "found": after[name], "wanted": wanted[name]}
            values = {key: to_double(value).reshape(-1).cpu().numpy() for key, value in flat.items()}
            cause = update_cause(**values, num_bad=len(bad), num_parameters=len(after))
            if weights is not None and not weights.is_replicas:
                where = of_weights(weights, name, after[name], wanted[name], copy=copy)
            self._rung_result.blame(step=self._at.number, parameter=name, cause=cause + where)

    def _see_gradients(self, seen: ObservedStep, *, is_data_right: bool) -> None:
        self._rung_result.count("gradients", len(self.right) * len(seen.gradients))
        if all(_same(parts, self.right) for parts in seen.gradients):
            return
        bad = [self._differing(parts) for parts in seen.gradients]
        wrong = [rank for rank, names in enumerate(bad) if names]
        if not wrong:
            self._see_presence(seen.gradients)
            return
        names = self._bad = bad[wrong[0]]
        case = self._case(seen.gradients, worst_first(bad))
        placed = None if case is None or self._rung_result.first_difference else placing_cause(case)
        if placed is not None:
            self._rung_result.blame(step=self._at.number, parameter=placed[0], cause=placed[1])
            return
        where = of_gradients(case, names=names, wrong=wrong, copies=len(bad))
        cause = self._inquiry.cause(seen.gradients, names, wrong[0], is_data_right, seen.dealt)
        if self._rung_result.first_difference is not None:
            self._inquiry.unexplained = []  # what came before the gradients explains them
        self._rung_result.blame(step=self._at.number, parameter=names[0], cause=cause + where)

    def _case(self, copies: Sequence[Tensors], names: Sequence[str]) -> GradientCase | None:
        """Return the evidence about placement, or None if ranks are plain replicas."""
        if self._places is None or self._places.is_replicas:
            return None
        floors = {name: self._inquiry.floor(name) for name in names}
        return GradientCase(places=self._places, right=self.right, copies=copies, bad=names, floors=floors)

    def _see_presence(self, everywhere: Sequence[Tensors]) -> None:
        """Report a gradient of zeros where the other has none: weight decay and momentum act on zeros."""
        for rank, parts in enumerate(everywhere):
            for name in sorted(set(parts) ^ set(self.right)):
                there, here = ("zeros", "none") if name in parts else ("none", "zeros")
                of = of_copy(name, rank, places=self._places)
                cause = f"its gradient is {there} on {of} but {here} in one process: the optimizer will differ"
                self._rung_result.blame(step=self._at.number, parameter=name, cause=cause)
                return

    def _differing(self, parts: Tensors) -> list[str]:
        """Return the parameters whose distance exceeds their floor, worst first."""
        worst = {}
        for name in sorted({*parts, *self.right}):
            if name not in self.right or name not in parts:
                present = parts.get(name, self.right.get(name))
                assert present is not None
                apart = euclidean_norm(present)
                if apart == 0.0:
                    continue
            else:
                apart = euclidean_distance(parts[name], self.right[name])
            floor = self._inquiry.floor(name) if apart else 0.0
            verdict = verdict_of_distance(apart, floor)
            self._rung_result.note(verdict, difference=apart, floor=floor)
            if verdict == DIFFERENT:
                worst[name] = apart / max(floor, 1e-300)
        return sorted(worst, key=lambda key: -worst[key])

    def _see_losses(self, losses: Sequence[float]) -> None:
        for rank, loss in enumerate(losses):
            wanted = self._inquiry.gradient.loss
            none = not math.isfinite(loss) and not math.isfinite(wanted)  # both overflow, whether to inf or NaN
            apart = 0.0 if loss == wanted or none else abs(loss - wanted)
            floor = self._inquiry.floors.loss if apart else 0.0
            if verdict_of_distance(apart, floor) == DIFFERENT:
                ratio = loss / self._inquiry.gradient.loss if self._inquiry.gradient.loss else float("inf")
                cause = f"the reported loss is {ratio:.4g} times the one-process loss on rank {rank}: not global"
                self._rung_result.blame(step=self._at.number, parameter="(loss)", cause=cause)
                return

    def _see_buffers(self, everywhere: Sequence[Tensors], names: Collection[str]) -> None:
        wanted = {name: b.detach() for name, b in self._reference.model.named_buffers() if name in names}
        for name, target in wanted.items():
            apart = [euclidean_distance(buffers[name], target) for buffers in everywhere]
            floor = self._inquiry.floors.buffers.get(name, 0.0) if any(apart) else 0.0
            self._rung_result.count("buffers", len(apart))
            for value in apart:
                self._rung_result.note(verdict_of_distance(value, floor), difference=value, floor=floor)
            if any(verdict_of_distance(value, floor) == DIFFERENT for value in apart):
                self._rung_result.blame(
                    step=self._at.number, parameter=name, cause=self._inquiry.buffer_cause(name, everywhere)
                )


def _same(parts: Tensors, right: Tensors) -> bool:
    return set(parts) == set(right) and all(torch.equal(parts[name], right[name]) for name in right)
