"""The synchronous step: every replica runs its microbatches, gradients are added, all take the same step."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.place.batchnorm import StatisticsTape
from paceline.place.buffers import BufferPolicy
from paceline.place.exact import no_grid
from paceline.place.replicate import Reducer
from paceline.place.sync_bn import Rounds
from paceline.step.given import Given
from paceline.step.joint import BUFFERS, FINGERPRINT, STOP, Joint, joint_counts
from paceline.step.later import Later
from paceline.step.loss import LossContract, Terms
from paceline.step.nested import to_device
from paceline.step.result import StepResult
from paceline.step.turns import ALONE, Turns
from paceline.step.update import LateCheck, Update
from paceline.step.whole import gather, quotients
from paceline.streams import Streams
from paceline.torch_private import version
from paceline.world import World

MOST_ATTEMPTS = 4
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a step is made of."""

    model: nn.Module
    world: World
    contract: LossContract
    reducer: Reducer
    tape: StatisticsTape
    buffers: BufferPolicy
    update: Update
    streams: Streams
    precision: str = "fp32"
    exact: bool = False
    rounds: Rounds | None = None
    turns: Turns = ALONE


class SpmdStep:
    """One program on every rank. `run` is a transaction: it commits on all ranks or on none."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.step = 0
        self._names: tuple[str, ...] | None = None
        self.late = LateCheck(parts.update)
        self._spare: Any = None
        self._seen_writes = parts.world.world_size == 1 and not parts.exact

    def run(self, given: Given, *, stop: bool = False) -> StepResult:
        """Forward, backward, reduce, clip, update. `stop` is this rank's wish to stop after it.

        Raises:
            NonFiniteError: loss or gradient is not finite, and the run stops for that.
            DesyncError: the ranks disagree on the terms of the loss or on the data.
        """
        if not self.parts.model.training:
            self.parts.model.train()
        result = self.gradients(given, stop=stop)
        at_once = self.parts.world.device.type == "cpu" or self.parts.update.skips
        known = (result.loss, result.agreed.counts) if at_once else (None, None)
        began = time.perf_counter()
        norm, taken = self.parts.update.commit(step=self.step + 1, loss=known[0], counts=known[1])
        if not taken:
            self.parts.tape.undo()
        self.step += 1
        result.norm = None if norm is None else Later(norm)
        result.skipped = not taken
        result.compute_seconds += time.perf_counter() - began
        if not at_once:
            self.late.hear(result)
        return result

    def gradients(self, given: Given, *, stop: bool = False) -> StepResult:
        """Leave the global gradient in every `.grad`, and update nothing but running statistics."""
        started = time.perf_counter()
        for _ in range(MOST_ATTEMPTS):
            self.parts.tape.begin()
            self.parts.reducer.begin()
            before = self._versions()
            joint, divide = (self._whole if self.parts.contract.over_batch else self._passes)(given, stop)
            waiting = time.perf_counter()
            self._refuse_writes(before)
            if self.parts.reducer.finish(divisor=joint.divisor() if divide else None):
                break
        else:
            raise no_grid(step=self.step + 1, attempts=MOST_ATTEMPTS)
        self.parts.tape.fold(num_micro=given.num_micro)
        self._settle_buffers(joint)
        ended = time.perf_counter()
        return StepResult(
            step=self.step + 1,
            samples=given.num_samples,
            joint=joint,
            norm=None,
            compute_seconds=waiting - started,
            communication_seconds=ended - waiting,
        )

    def close(self) -> None:
        """Remove what was hooked into the model."""
        self.parts.reducer.close()
        self.parts.tape.close()

    def _versions(self) -> list[int]:
        """In the first step of several replicas: what shows that a forward has written to a parameter."""
        return [] if self._seen_writes else [version(parameter) for parameter in self.parts.model.parameters()]

    def _refuse_writes(self, before: list[int]) -> None:
        after, self._seen_writes = self._versions(), True
        pairs = zip(self.parts.model.named_parameters(), before, after, strict=False)
        names = [name for (name, _), old, new in pairs if old != new]
        if names:
            raise JobError(
                f"the forward writes to the parameter {names[0]}: each replica would write other values.",
                cause="nn.Embedding(max_norm=...), or a forward that assigns to its weights",
                hint="F.normalize(self.weight) where it is used, or --ranks 1 without --train.exact",
            )

    def _passes(self, given: Given, stop: bool) -> tuple[Joint, bool]:
        """Forward and backward of this rank's microbatches; the joint vector travels under the last one."""
        device = self.parts.world.device
        data = [to_device(micro.data, device) for micro in given.micro]
        counts = self._counts(data)
        missing = self._missing(given)
        joint: Joint | None = None
        for position, (micro, batch) in enumerate(zip(given.micro, data, strict=True)):
            last = position == len(data) - 1
            terms = self._forward(micro.index, batch, micro.num_samples)
            joint = joint or self._joint(given, terms, stop)
            joint.put(micro.index, terms)
            if last and not missing:
                self._send(joint)
            self._backward(self._loss(terms, counts), last=last and not missing)
        joint = self._stand_in(given, data, missing, joint, stop)
        joint.expect(counts or {})
        return joint, counts is None

    def _whole(self, given: Given, stop: bool) -> tuple[Joint, bool]:
        """One pass, with the loss of the whole batch on every replica that has a part of it."""
        parts = self.parts
        mine, terms = None, None
        for micro in given.micro:
            batch = to_device(micro.data, parts.world.device)
            mine = self._output(micro.index, batch), batch
        own = sum(micro.num_samples for micro in given.micro)
        whole = gather(mine, world=parts.world, num_samples=own)
        if whole is not None:
            with self.autocast():
                terms = parts.contract.terms(*whole, num_samples=given.num_samples)
        joint = self._joint(given, terms, stop)
        if terms is not None and given.micro[0].index == 0:  # all have the same: it is told once
            joint.put(0, terms)
        self._send(joint)
        if terms is not None:
            self._backward(quotients(terms), last=True)
        return joint, False

    def _missing(self, given: Given) -> int:
        """Rounds in which the layers meet and this replica has no sample."""
        if self.parts.rounds is None:
            return 0
        return -(-given.num_micro // self.parts.world.world_size) - len(given.micro)

    def _stand_in(self, given: Given, data: Sequence[Any], missing: int, joint: Joint | None, stop: bool) -> Joint:
        """Take part in those rounds with weight zero; as on every rank, the joint vector is sent in the last one."""
        rounds = self.parts.rounds
        if rounds is None or not missing:
            if joint is None:
                joint = self._joint(given, None, stop)
                self._send(joint)
            self._spare = data[0] if data else self._spare
            return joint
        self._spare = data[0] if data else self._spare
        for number in range(missing):
            if self._spare is None:
                raise JobError(
                    f"the first batch has {given.num_micro} microbatches for {self.parts.world.world_size} replicas.",
                    cause="sync_bn needs a sample on every replica in its first step",
                    hint="a smaller --train.micro_batch_size, or --train.buffers fold",
                )
            rounds.weight = 0.0
            terms = self._forward(given.num_micro, self._spare, 1)
            joint = joint or self._joint(given, terms, stop)
            if number == missing - 1:
                self._send(joint)
            nothing = torch.stack([total for total, _ in terms.values()]).sum() * 0.0
            self._backward(nothing, last=number == missing - 1)
            rounds.weight = 1.0
        assert joint is not None
        return joint

    def _settle_buffers(self, joint: Joint) -> None:
        """Read from the joint vector where that costs nothing; on a GPU, follow this rank's own."""
        buffers = self.parts.buffers
        on_host = self.parts.world.device.type == "cpu"
        buffers.settle(changed=joint.agreed().buffers_changed if on_host else buffers.changed())

    def _joint(self, given: Given, terms: Terms | None, stop: bool) -> Joint:
        names = self._agree_names(terms)
        joint = Joint(world=self.parts.world, names=names, num_micro=given.num_micro)
        joint.flag(STOP, float(stop))
        joint.flag(FINGERPRINT, float(given.fingerprint))
        return joint

    def _send(self, joint: Joint) -> None:
        joint.flag(BUFFERS, float(self.parts.buffers.changed()))
        joint.start()

    def _agree_names(self, terms: Terms | None) -> tuple[str, ...]:
        """Once: the names of the terms, also for ranks whose first step holds no sample."""
        if self._names is None:
            everybody = self.parts.world.gather_json(None if terms is None else list(terms))
            first = next(names for names in everybody if names is not None)
            if len(first) > 1 and not (self.parts.contract.counts_first or self.parts.contract.over_batch):
                raise JobError(
                    f"the loss has {len(first)} terms ({', '.join(first)}), each with its own count.",
                    cause="their counts over all ranks must be known before the first backward",
                    hint="count=lambda batch: {name: number for each term}",
                )
            self._names = tuple(first)
        return self._names

    def _counts(self, data: Sequence[Any]) -> dict[str, Tensor] | None:
        contract = self.parts.contract
        if not contract.counts_first:
            return None
        local: dict[str, float | Tensor] = {}
        for batch in data:
            for name, count in contract.counts(batch).items():
                local[name] = local.get(name, 0.0) + count
        if self._names is None:
            everybody = self.parts.world.gather_json(list(local))
            self._names = tuple(next(names for names in everybody if names))
        return joint_counts(local, world=self.parts.world, names=self._names)

    def _output(self, index: int, batch: Any) -> Any:
        parts = self.parts
        parts.tape.at(index)
        with parts.turns.forward(lambda: parts.streams.enter(step=self.step, microbatch=index)), self.autocast():
            return parts.contract.forward(parts.model, batch)

    def _forward(self, index: int, batch: Any, num_samples: int) -> Terms:
        parts = self.parts
        parts.tape.at(index)
        with parts.turns.forward(lambda: parts.streams.enter(step=self.step, microbatch=index)), self.autocast():
            output = parts.contract.forward(parts.model, batch)
            return parts.contract.terms(output, batch, num_samples=num_samples)

    def _loss(self, terms: Terms, counts: dict[str, Tensor] | None) -> Tensor:
        if counts is None:
            (total, _), *_ = terms.values()
            return total
        missing = sorted(set(terms) - set(counts))
        if missing:
            raise JobError(
                f"count= gives no count for the loss term {', '.join(missing)}.",
                hint=f"count=lambda batch: {{{missing[0]!r}: number, ...}}",
            )
        parts = [total / counts[name].to(total.dtype) for name, (total, _) in terms.items()]
        return torch.stack(parts).sum() if len(parts) > 1 else parts[0]

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        if not loss.requires_grad:
            raise JobError(
                "the loss does not depend on any trainable parameter.",
                cause="a detach(), .item() or torch.no_grad() inside the loss, or a frozen model",
                hint="return the loss as a tensor that the model's output flows into",
            )
        self.parts.reducer.before_backward(last=last)
        with self.parts.turns.backward():
            self.parts.update.scaled(loss).backward()
        self.parts.reducer.after_backward()

    def autocast(self) -> AbstractContextManager[None]:
        """The precision that forward and loss run in."""
        dtype = _AUTOCAST.get(self.parts.precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.parts.world.device.type, dtype=dtype)
