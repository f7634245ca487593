"""The second rung: the layout beside one process, step by step, from equal weights each time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.feed.feed import make_feed
from paceline.feed.types import Cut, StepInput
from paceline.order.cursor import Cursor
from paceline.prove.cause import Evidence, data_cause, find_cause
from paceline.prove.noise import distance, gradient_floor
from paceline.prove.reference import Gradient, Reference
from paceline.train.built import Built

BITWISE, ROUNDING, DIFFERENT = "bitwise", "rounding", "different"
_ORDER = (BITWISE, ROUNDING, DIFFERENT)


@dataclass(kw_only=True)
class Finding:
    """What one rung found."""

    verdict: str = BITWISE
    max_difference: float = 0.0
    noise_floor: float = 0.0
    first_difference: dict[str, Any] | None = None
    detail: str = ""
    ratios: dict[str, float] = field(default_factory=dict)

    def note(self, verdict: str, *, difference: float = 0.0, floor: float = 0.0) -> None:
        """Remember the worst."""
        self.verdict = max(self.verdict, verdict, key=_ORDER.index)
        if difference >= self.max_difference:
            self.max_difference, self.noise_floor = difference, floor

    def blame(self, *, step: int, parameter: str, cause: str) -> None:
        """Remember the first difference."""
        self.verdict = DIFFERENT
        if self.first_difference is None:
            self.first_difference = {"step": step, "parameter": parameter, "cause": cause}


class Lockstep:
    """Runs on every rank; rank 0 holds the reference and judges."""

    def __init__(self, *, built: Built, reference: Reference | None) -> None:
        self._built = built
        self._world = built.world
        self._reference = reference
        self.finding = Finding()

    def run(self, cursors: list[Cursor]) -> Finding:
        """Compare one step at each cursor."""
        self._compare_start()
        for cursor in cursors:
            self._step(cursor)
        finding: Finding = Finding(**self._world.share_json(_as_json(self.finding)))
        return finding

    def _compare_start(self) -> None:
        reference = self._reference
        if reference is None:
            return
        wanted = dict(reference.model.named_parameters())
        for name, parameter in self._built.model.named_parameters():
            if not torch.equal(parameter.detach(), wanted[name].detach()):
                self.finding.blame(step=0, parameter=name, cause="unequal start weights: the build is not repeatable")

    def _step(self, cursor: Cursor) -> None:
        self._take_over()
        given = self._given(cursor)
        self._built.step.step = cursor.step
        result = self._built.step.gradients(given)
        mine = {m.name: m.parameter.grad for m in self._built.named if m.parameter.grad is not None}
        mine = {name: value.detach().clone() for name, value in mine.items()}
        indices = self._world.gather_json([[m.index, list(m.indices)] for m in given.micro])
        everybody = self._gathered(mine)
        right: dict[str, Tensor] = {}
        if self._reference is not None:
            at = {"step": cursor.step, "epoch": cursor.epoch, "position": cursor.position}
            gradient = self._reference_gradient(at)
            right = gradient.total()
            self._judge_data(indices, gradient, cursor.step)
            self._judge_loss(result.loss, gradient, cursor.step)
            self._judge_gradients(everybody, gradient, right, at)
            self._judge_buffers(cursor.step)
        self._judge_update(right, cursor.step)

    def _reference_gradient(self, at: Mapping[str, int]) -> Gradient:
        assert self._reference is not None
        return self._reference.gradient(**at)

    def _take_over(self) -> None:
        """Give every rank the reference's weights and buffers."""
        source = None if self._reference is None else {
            **dict(self._reference.model.named_parameters()),
            **dict(self._reference.model.named_buffers()),
        }  # fmt: skip
        with torch.no_grad():
            for name, tensor in [*self._built.model.named_parameters(), *self._built.model.named_buffers()]:
                if source is not None:
                    tensor.copy_(source[name])
                self._world.broadcast(tensor.data)

    def _given(self, cursor: Cursor) -> StepInput:
        built = self._built
        feed = make_feed(
            data=built.job.train_data,
            collate=built.job.collate,
            order=built.job.order,
            seed=built.settings.seed,
            cut=Cut(
                global_batch_size=built.plan.global_batch_size,
                micro_batch_size=built.plan.micro_batch_size,
                replica=self._world.rank,
                replicas=self._world.world_size,
                drop_last=built.settings.data.drop_last,
            ),
            cursor=cursor,
            workers=built.settings.data.workers,
            sample_seeds=built.settings.data.sample_seeds,
        )
        try:
            return next(iter(feed))
        finally:
            feed.close()

    def _gathered(self, mine: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Every rank's gradient, on rank 0's side of the comparison."""
        names = self._world.gather_json(sorted(mine))
        found: list[dict[str, Tensor]] = []
        for rank, theirs in enumerate(names):
            parts = {}
            for member in self._built.named:
                if member.name in theirs:
                    is_mine = rank == self._world.rank and member.name in mine
                    part = mine[member.name].clone() if is_mine else torch.empty_like(member.parameter.detach())
                    parts[member.name] = self._world.broadcast(part, source=rank)
            found.append(parts)
        return found

    def _judge_data(self, indices: list[Any], gradient: Gradient, step: int) -> None:
        consumed = {int(index): samples for mine in indices for index, samples in mine}
        wanted = {index: list(samples) for index, samples in enumerate(gradient.indices)}
        cause = data_cause(consumed, wanted)
        if cause is not None:
            self.finding.blame(step=step, parameter="(data)", cause=cause)

    def _judge_loss(self, loss: float, gradient: Gradient, step: int) -> None:
        size = max(abs(gradient.loss), 1e-30)
        if abs(loss - gradient.loss) > 1e-3 * size:
            self.finding.ratios["loss"] = loss / gradient.loss if gradient.loss else float("inf")

    def _judge_gradients(
        self, everybody: list[dict[str, Tensor]], gradient: Gradient, right: Mapping[str, Tensor], at: Mapping[str, int]
    ) -> None:
        assert self._reference is not None
        if all(_same(parts, right) for parts in everybody):
            return
        floors = gradient_floor(self._reference, gradient, **at)
        for rank, parts in enumerate(everybody):
            bad = self._differing(parts, right, floors)
            if not bad:
                continue
            evidence = [self._evidence(name, parts, gradient, floors) for name in bad]
            shapes = self._world.world_size
            cause = find_cause(evidence, counts=gradient.counts, ranks=shapes, num_parameters=len(right))
            where = f" on rank {rank}" if rank or not self._differing(everybody[-1], right, floors) else ""
            self.finding.blame(step=at["step"], parameter=bad[0], cause=cause + where)
            return

    def _differing(
        self, parts: Mapping[str, Tensor], right: Mapping[str, Tensor], floors: Mapping[str, float]
    ) -> list[str]:
        """The parameters beyond their floor, worst first."""
        worst = {}
        for name in sorted({*parts, *right}):
            if name not in right:
                worst[name] = float("inf")
                continue
            apart = distance(parts[name], right[name]) if name in parts else float(right[name].double().norm())
            floor = floors.get(name, 0.0)
            if apart > floor or (apart != apart):
                worst[name] = apart / max(floor, 1e-300)
                self.finding.note(DIFFERENT, difference=apart, floor=floor)
            elif apart > 0.0:
                self.finding.note(ROUNDING, difference=apart, floor=floor)
        return sorted(worst, key=lambda key: -worst[key])

    @staticmethod
    def _evidence(name: str, parts: Mapping[str, Tensor], gradient: Gradient, floors: Mapping[str, float]) -> Evidence:
        shape = next((c[name] for c in gradient.contributions if name in c), parts.get(name))
        assert shape is not None
        zero = torch.zeros_like(shape)
        found = parts.get(name, zero).double().reshape(-1) * gradient.divisor
        rows = [c.get(name, zero).double().reshape(-1) for c in gradient.contributions]
        return Evidence(
            name=name,
            found=found.numpy(),
            contributions=torch.stack(rows).numpy(),
            floor=max(floors.get(name, 0.0) * gradient.divisor, 1e-300),
        )

    def _judge_buffers(self, step: int) -> None:
        assert self._reference is not None
        wanted = dict(self._reference.model.named_buffers())
        for name, buffer in self._built.model.named_buffers():
            apart = distance(buffer, wanted[name])
            if apart == 0.0:
                continue
            eps = torch.finfo(buffer.dtype).eps if buffer.is_floating_point() else 0.0
            floor = 256.0 * eps * float(wanted[name].double().norm() + 1.0)
            if apart > floor or apart != apart:
                cause = (
                    "buffers: running statistics of this rank's microbatches alone, or updated another number of times"
                )
                self.finding.blame(step=step, parameter=name, cause=cause)
                self.finding.note(DIFFERENT, difference=apart, floor=floor)
            else:
                self.finding.note(ROUNDING, difference=apart, floor=floor)

    def _judge_update(self, right: Mapping[str, Tensor], step: int) -> None:
        """The same gradient into both optimizers; then the weights must be equal."""
        names = self._world.share_json(sorted(right))
        for member in self._built.named:
            if member.name not in names:
                member.parameter.grad = None
                continue
            value = right[member.name].clone() if right else torch.empty_like(member.parameter.detach())
            member.parameter.grad = self._world.broadcast(value.to(member.parameter.dtype))
        before = {m.name: m.parameter.detach().clone() for m in self._built.named}
        self._built.update.commit(step=step + 1, loss=0.0)
        if self._reference is not None:
            self._reference.update(right)
            self._judge_weights(before, step)
        self._judge_other_ranks(step)

    def _judge_weights(self, before: Mapping[str, Tensor], step: int) -> None:
        assert self._reference is not None
        wanted = dict(self._reference.model.named_parameters())
        for member in self._built.named:
            weight, target = member.parameter.detach(), wanted[member.name].detach()
            if torch.equal(weight, target):
                continue
            apart, moved = distance(weight, target), distance(target, before[member.name])
            eps = torch.finfo(weight.dtype).eps
            floor = 64.0 * eps * float(target.double().norm()) + 64.0 * eps * moved
            if apart <= floor:
                self.finding.note(ROUNDING, difference=apart, floor=floor)
                continue
            stale = torch.equal(weight, before[member.name])
            cause = (
                "the optimizer does not move it: it holds other parameters than the model's (stale)"
                if stale
                else "equal gradients, other weights: another learning rate, group or optimizer state"
            )
            self.finding.note(DIFFERENT, difference=apart, floor=floor)
            self.finding.blame(step=step, parameter=member.name, cause=cause)

    def _judge_other_ranks(self, step: int) -> None:
        """Every rank's weights after the update must be rank 0's."""
        for member in self._built.named:
            mine = member.parameter.detach()
            theirs = self._world.broadcast(mine.clone())
            apart = self._world.gather_json(not torch.equal(mine, theirs))
            if any(apart):
                cause = f"equal gradients, other weights on rank {apart.index(True)}: frozen or updated otherwise there"
                self.finding.blame(step=step, parameter=member.name, cause=cause)
                return


def _same(parts: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return set(parts) == set(right) and all(torch.equal(parts[name], right[name]) for name in right)


def _as_json(finding: Finding) -> dict[str, Any]:
    return dict(vars(finding))
