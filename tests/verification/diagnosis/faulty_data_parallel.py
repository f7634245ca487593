"""A data-parallel loop in plain torch with switches for faults; the ranks run one after another in one process.

It shares nothing with the package's feed, step or placement. What a rank would send is a list of tensors here, and
an all-reduce is a sum over that list. Each mistake is made where people make it, in code, not as a weighting.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.stream.iterable_loader import checksum
from paceline.job import Job
from paceline.torch_internals.rng import random_blocks, seed_all, seed_torch, stream_key
from paceline.verification.compare_step import StepComparison
from paceline.verification.diagnosis.observed_step import ObservedStep
from paceline.verification.reference.dropout_isolation import without_dropout
from paceline.verification.reference.reference import Reference, ReferenceConfig, RunPosition
from paceline.verification.reference.reference_step import run_reference_step
from paceline.verification.rung_result import RungResult


@dataclass
class Rank:
    """One player."""

    model: nn.Module
    optimizers: list[Any]
    stream: int = 0
    left_over: dict[str, Tensor] = field(default_factory=dict)


class Bed:
    """Plays `ranks` ranks with one mistake, or none."""

    def __init__(
        self,
        job: Job,
        spec: ReferenceConfig,
        *,
        ranks: int,
        fault: str = "",
        layer: str = "",
        cast: Callable[[Any], Any] = lambda x: x,
    ) -> None:
        self.job, self.spec, self.fault, self.layer = job, spec, fault, layer
        self.reference = Reference(job=job, config=spec, cast=cast)
        self.ranks = [self._rank(number) for number in range(ranks)]
        self.rung_result = RungResult()
        self._last: dict[str, Tensor] = {}

    def run(self, places: Sequence[RunPosition]) -> RungResult:
        """Lockstep over these places, as `verify` does it."""
        self._compare_start()
        for at in places:
            self._take_over()
            judge = StepComparison(
                run_reference_step(self.reference, at), rung_result=self.rung_result, last_gradient=self._last
            )
            judge.compare_forward_backward(self._play(at))
            if judge.needs_dropout_rerun:
                with without_dropout([self.reference.model, *(rank.model for rank in self.ranks)]):
                    self._take_over()
                    judge.report_dropout_rerun(self._play(at).gradients)
                self._take_over()
            if judge.is_finite:
                self._update(judge, judge.expected_gradient)
                self._last = dict(judge.expected_gradient)
            if self.rung_result.first_difference is not None:
                break
        return self.rung_result

    # -- building

    def _rank(self, number: int) -> Rank:
        seed = stream_key(self.spec.seed, "build") + (number if self.fault == "unequal initial weights" else 0)
        seed_all(seed)
        model = self.job.model()
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if self.fault == "stale parameters" and number == 0:
            named = [(n, nn.Parameter(p.detach().clone())) for n, p in named]
        if self.fault == "a group is missing":
            named = [(n, p) for n, p in named if not n.startswith(self.layer)]
        made = self.job.optimizer(named)
        optimizers = list(made) if isinstance(made, list) else [made]
        for group in (g for o in optimizers for g in o.param_groups):
            group["lr"] *= len(self.ranks) + 2 if self.fault == "lr scaled" else 1
            if self.fault == "weight decay on one rank" and number == 1:
                group["weight_decay"] = 0.3
        rank = Rank(model=model, optimizers=optimizers)
        for block_number, block in enumerate(random_blocks(model)):
            block.register_forward_pre_hook(self._seeder(rank, block_number))
        return rank

    ranks: list[Rank] = []  # noqa: RUF012  (read while the list is built)

    @staticmethod
    def _seeder(rank: Rank, block: int) -> Callable[..., None]:
        def hook(module: nn.Module, _: object) -> None:
            if module.training:
                seed_torch((rank.stream ^ (0x9E37_79B9_7F4A_7C15 * (block + 1))) & 0x7FFF_FFFF_FFFF_FFFF)

        return hook

    def _compare_start(self) -> None:
        for number, rank in enumerate(self.ranks):
            for (name, mine), theirs in zip(
                rank.model.named_parameters(), self.reference.model.parameters(), strict=True
            ):
                if not torch.equal(mine, theirs):
                    self.rung_result.record_difference(
                        step=1, parameter=name, cause=f"unequal initial weights on rank {number}"
                    )

    def _take_over(self) -> None:
        source = {**dict(self.reference.model.named_parameters()), **dict(self.reference.model.named_buffers())}
        with torch.no_grad():
            for rank in self.ranks:
                for name, tensor in [*rank.model.named_parameters(), *rank.model.named_buffers()]:
                    tensor.copy_(source[name])

    # -- one step

    def _play(self, at: RunPosition) -> ObservedStep:
        num = len(self.ranks)
        pieces = self.reference.read_microbatches(at)
        read = {j: list(piece.samples) for j, piece in enumerate(pieces)}
        data = {j: piece.data for j, piece in enumerate(pieces)}
        self._spoil_data(at, read, data)
        before = [dict(rank.model.named_buffers()) for rank in self.ranks]
        start = {n: b.clone() for n, b in before[0].items()}
        grads, counts, losses, statistics = [], [], [], {}
        for number in range(num):
            mine = range(number, len(pieces), num)
            found = self._backward(at, number, mine, data, read, statistics, start)
            grads.append(found[0])
            counts.append(found[1])
            losses.append(found[2])
        total_count = sum(sum(c) for c in counts)
        reduced = self._reduced(grads, counts, total_count, sum(len(r) for r in read.values()))
        self._fold(start, statistics, len(pieces))
        loss = sum(losses) / (total_count if self.job.count is None else 1.0) if total_count else float("nan")
        reported = [loss] * num
        if self.fault == "loss logged by rank 0 alone":
            reported = [losses[0] / sum(counts[0])] * num
        return ObservedStep(
            gradients=reduced,
            buffers=[{n: b.detach().clone() for n, b in rank.model.named_buffers()} for rank in self.ranks],
            losses=reported,
            samples=read,
            contents={j: checksum(value, 0) for j, value in data.items()},
        )

    def _spoil_data(self, at: RunPosition, read: dict[int, list[int]], data: dict[int, Any]) -> None:
        num = len(self.ranks)
        if self.fault in ("same samples", "same samples, unseen"):
            for j in list(data):
                source = j - j % num
                data[j] = data[source]
                if self.fault == "same samples":
                    read[j] = read[source]
        if self.fault == "a sample dropped":
            read[1] = read[1][:-1]
            data[1] = self.reference.cast(self.reference.reader.read(epoch=at.epoch, indices=read[1]))
        if self.fault == "a sample repeated":
            read[1] = [*read[1], read[1][0]]
            data[1] = self.reference.cast(self.reference.reader.read(epoch=at.epoch, indices=read[1]))
        if self.fault == "augmented twice":
            data[1] = tuple(part + 0.01 if part.is_floating_point() else part for part in data[1])

    def _backward(
        self,
        at: RunPosition,
        number: int,
        mine: range,
        data: Any,
        read: Any,
        statistics: dict[Any, Any],
        start: dict[str, Tensor],
    ) -> tuple[dict[str, Tensor], list[float], float]:
        rank, job = self.ranks[number], self.job
        rank.model.train()
        rank.model.zero_grad(set_to_none=True)
        if self.fault == "not set to zero":
            for name, p in rank.model.named_parameters():
                p.grad = rank.left_over[name].clone() if name in rank.left_over else None
        known = self._known(data)
        counts, total = [], 0.0
        clipped: dict[str, Tensor] = {}
        for j in mine:
            stream = j // len(self.ranks) if self.fault == "equal dropout" else j
            rank.stream = stream_key(self.spec.seed, at.steps_done, stream)
            seed_all(rank.stream + (number * 7 if self.fault == "dropout by rank" else 0))
            for module in self._norms(rank.model):
                module.momentum = 1.0
            output = rank.model(*data[j][:-1])
            terms = job.loss(output, data[j])
            if self.fault == "extra forward":
                rank.model(*data[j][:-1])
            for name, buffer in rank.model.named_buffers():
                statistics[(j, name)] = buffer.clone()
            terms = terms if isinstance(terms, dict) else {"loss": terms}
            loss = sum(value / self._term_count(name, known, data, mine) for name, (value, _) in terms.items())
            count = float(next(iter(terms.values()))[1])
            if self.fault == "microbatch means":
                loss = loss / count
            if self.fault == "only the last microbatch":
                rank.model.zero_grad(set_to_none=True)
            if self.fault == "frozen on one rank" and number == 1:
                self._frozen(rank.model, loss)
            else:
                loss.backward()
            counts.append(count)
            total += float(loss.detach()) * (count if self.fault == "microbatch means" else 1.0)
        if self.fault == "unused as zeros":
            for p in rank.model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        del clipped
        return {n: p.grad.clone() for n, p in rank.model.named_parameters() if p.grad is not None}, counts, total

    def _frozen(self, model: nn.Module, loss: Tensor) -> None:
        held = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        loss.backward()
        for name, p in model.named_parameters():
            if name.startswith(self.layer):
                p.grad = held[name]

    def _known(self, data: dict[int, Any]) -> dict[str, float] | None:
        if self.job.count is None:
            return None
        totals: dict[str, float] = {}
        for batch in data.values():
            for name, value in self.job.count(batch).items():
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def _term_count(self, name: str, known: Any, data: Any, mine: range) -> float:
        if known is None:
            return 1.0
        if self.fault == "a term's local count" and name == self.layer:
            return len(self.ranks) * sum(float(self.job.count(data[j])[name]) for j in mine)
        return known[name]

    def _reduced(
        self, grads: list[dict[str, Tensor]], counts: list[list[float]], total: float, samples: int
    ) -> list[dict[str, Tensor]]:
        num, fault = len(grads), self.fault
        divisor = 1.0 if self.job.count is not None else total
        names = [n for n, _ in self.ranks[0].model.named_parameters() if any(n in g for g in grads)]
        zero = {n: torch.zeros_like(p) for n, p in self.ranks[0].model.named_parameters()}
        if fault == "mean of rank means":
            grads = [{n: g / sum(c) / num for n, g in mine.items()} for mine, c in zip(grads, counts, strict=True)]
            divisor = 1.0
        if fault == "microbatch means":
            divisor = float(sum(len(c) for c in counts))
        if fault == "not divided by rounds":
            divisor /= max(len(c) for c in counts)
        if fault == "clipped per rank":
            grads = [self._clip({n: g / divisor for n, g in mine.items()}) for mine in grads]
            divisor = 1.0
        if fault == "divided by samples":
            divisor = float(samples)
        factor = {"loss times ranks": num, "divided by ranks again": 1 / num, "divided by ranks twice": 1 / num**2}
        factor |= {"all reduced twice": num, "loss scaled": 1.7, "sign": -1.0, "never divided": divisor}
        out = {}
        for name in names:
            parts = [g.get(name, zero[name]) for g in reversed(grads)]  # a ring adds in an order of its own
            value = parts[0].clone()
            for part in parts[1:]:
                value = value + part
            if fault == "wire in bf16":
                value = sum((part.bfloat16() for part in parts[1:]), parts[0].bfloat16()).to(value.dtype)
            value = value * factor.get(fault, 1.0) if fault in factor else value
            if fault == "one reduced twice" and name.startswith(self.layer):
                value = value * num
            out[name] = value / divisor
        if fault == "weight decay in the gradient":
            weights = dict(self.ranks[0].model.named_parameters())
            out = {n: g + 0.1 * weights[n].detach() for n, g in out.items()}
        if fault == "not set to zero":
            for rank, mine in zip(self.ranks, grads, strict=True):
                rank.left_over = dict(mine)
        everywhere = [dict(out) for _ in range(num)]
        if fault == "one not reduced":
            for mine, held in zip(everywhere, grads, strict=True):
                mine.update({n: held.get(n, zero[n]) / divisor for n in out if n.startswith(self.layer)})
        if fault == "one rank missed the reduction":
            everywhere[1] = {n: g / divisor for n, g in grads[1].items()}
        return everywhere

    @staticmethod
    def _clip(grads: dict[str, Tensor]) -> dict[str, Tensor]:
        if not grads:
            return grads
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        scale = min(1.0, 0.05 / float(norm.clamp(min=1e-9)))
        return {n: g * scale for n, g in grads.items()}

    @staticmethod
    def _norms(model: nn.Module) -> list[Any]:
        return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def _fold(self, start: dict[str, Tensor], statistics: dict[Any, Tensor], num_micro: int) -> None:
        """Running statistics microbatch after microbatch, on every rank; or as the mistake has it."""
        momentum = 0.1
        num = len(self.ranks)
        for number, rank in enumerate(self.ranks):
            order = list(range(num_micro))
            if self.fault == "batchnorm local":
                order = list(range(number, num_micro, num))
            if self.fault == "batchnorm of rank 0":
                order = list(range(0, num_micro, num))
            if self.fault == "extra forward":
                order = [j for j in order for _ in range(2)]
            for name, buffer in rank.model.named_buffers():
                value = start[name].clone()
                for j in order:
                    if name.endswith("num_batches_tracked"):
                        value = value + 1
                    elif (j, name) in statistics:
                        value = (1.0 - momentum) * value + momentum * statistics[(j, name)]
                with torch.no_grad():
                    buffer.copy_(value)

    def _update(self, judge: StepComparison, right: dict[str, Tensor]) -> None:
        afters = []
        for rank in self.ranks:
            for name, p in rank.model.named_parameters():
                p.grad = right[name].clone() if name in right else None
            before = {n: p.detach().clone() for n, p in rank.model.named_parameters()}
            if self.spec.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(rank.model.parameters(), self.spec.max_grad_norm)
            for optimizer in rank.optimizers:
                optimizer.step()
            afters.append((before, {n: p.detach() for n, p in rank.model.named_parameters()}))
        self.reference.update(right)
        for number, (before, after) in enumerate(afters):
            judge.compare_weights(
                weights_before=before, weights_after=after, location=f", on rank {number}" if number else ""
            )


def places(total: int, batch: int, steps: int) -> list[RunPosition]:
    """The first steps and the short last one."""
    starts = list(range(0, total, batch))
    chosen = [*starts[: steps - 1], starts[-1]] if len(starts) >= steps else starts
    return [RunPosition(steps_done=start // batch, epoch=0, batch_start=start) for start in dict.fromkeys(chosen)]


def copied(model: nn.Module) -> nn.Module:
    """A model for a job whose builds must be equal."""
    return copy.deepcopy(model)
