"""The reference: a naive one-process run that every layout is compared with.

It uses nothing of the loader, the step or the placement; only the order of samples and the keys of the random
streams, which are definitions.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.job import Job
from paceline.parallel.batchnorm.norm_tape import norms_with_statistics
from paceline.torch_internals.rng import BlockCallCounter, block_key, random_blocks, seed_all, seed_torch, stream_key
from paceline.verification.reference.forward import Forward
from paceline.verification.reference.loss_terms import known_counts, leaves_of, weighted_loss
from paceline.verification.reference.process_group_isolation import single_process
from paceline.verification.reference.sample_reader import reading_of
from paceline.verification.reference.weight_average import WeightAverage
from paceline.verification.reference.whole_batch import merge_microbatches, part_of


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The properties of the run that the reference depends on.

    `together`: microbatches that normalisation sees as one. `grid`: the relative step of exact mode's integers.
    `is_cut`: the layout computes a microbatch in slices (tp, cp, ep, sync_bn), each of which is rounded separately.
    `own_kernels`: attention or normalisation uses a different formula than in one process (cp, sync_bn).
    `loss_scale`: the factor of the loss in backward, so that fp16 can represent small gradients.
    `on_empty`: the effect of a loss term without a target: `stop`, or `zero`, which adds nothing to loss and gradient.
    """

    seed: int
    global_batch_size: int
    micro_batch_size: int
    max_grad_norm: float | None = None
    drop_last: bool = False
    autocast: torch.dtype | None = None
    sample_seeds: str = "auto"
    together: int = 1
    lr_factor: float = 1.0
    device: str = "cpu"
    grid: float = 0.0
    shards: int | None = None
    loss_scale: float = 1.0
    workers: int = 0
    is_cut: bool = False
    own_kernels: bool = False
    on_empty: str = "stop"


@dataclass(frozen=True, kw_only=True)
class RunPosition:
    """A position in the run: the steps done, and where the next batch begins; `number` counts steps as `train` does."""

    step: int
    epoch: int
    position: int

    @property
    def number(self) -> int:
        return self.step + 1


@dataclass(frozen=True, kw_only=True)
class Micro:
    """A microbatch: its samples, read and collated."""

    samples: tuple[int, ...]
    data: Any


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """The gradient of one step. `parts`, if requested, holds each microbatch's contribution before the division.

    With several terms each has its count in `term_counts`, and `parts` are already divided (`divisor` is 1).
    """

    total: dict[str, Tensor]
    counts: list[float]
    divisor: float
    loss: float
    samples: list[tuple[int, ...]]
    parts: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    term_counts: dict[str, list[float]] = field(default_factory=dict)
    """The counts of each term, by microbatch."""
    largest: dict[str, float] = field(default_factory=dict)
    empty: list[str] = field(default_factory=list)
    """The terms without a target that prevent a step: `train` stops there, or skips the step."""

    @property
    def counts_in_words(self) -> str:
        """The count of the step, or of each of its terms, in words."""
        if len(self.term_counts) < 2:
            return f"its count is {sum(self.counts):g}"
        return "its counts are " + ", ".join(f"{sum(each):g} of {name}" for name, each in self.term_counts.items())


class Reference:
    """The one-process run."""

    counts_of, _stream = staticmethod(known_counts), 0

    @single_process()
    def __init__(self, *, job: Job, spec: ReferenceConfig, cast: Callable[[Any], Any]) -> None:
        self.job = job
        self.spec = spec
        self.cast = cast
        seed_all(stream_key(spec.seed, "build"))
        self.model: nn.Module = job.model().to(spec.device)
        self._forward = Forward(job, self.model)
        self.average = WeightAverage(self.model, decay=job.ema)
        self._number = 0
        self._calls = BlockCallCounter()
        for number, block in enumerate(random_blocks(self.model)):
            block.register_forward_pre_hook(self._seeder(number))
        self.optimizers, self.schedules = self._optimizers()
        self.reading = reading_of(
            job=job,
            workers=spec.workers,
            seed=spec.seed,
            drop_last=spec.drop_last,
            sample_seeds=spec.sample_seeds,
            batch=spec.global_batch_size,
            shards=spec.shards,
        )

    def again(self) -> "Reference":
        """Return the same run from its start."""
        return self.with_spec()

    def with_spec(self, **changes: Any) -> "Reference":
        """Return the same run from its start, with changes to its `ReferenceConfig`."""
        return Reference(job=self.job, spec=replace(self.spec, **changes), cast=self.cast)

    def bare(self) -> "Reference":
        """Return a reference that does not process its gradients any further."""
        return self

    def _optimizers(self) -> tuple[list[Optimizer], list[Any]]:
        made = self.job.optimizer([(n, p) for n, p in self.model.named_parameters() if p.requires_grad])
        optimizers = list(made) if isinstance(made, list | tuple) else [made]
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["lr"] * self.spec.lr_factor if self.spec.lr_factor != 1.0 else group["lr"]
        return optimizers, [self.job.lr_schedule(o) for o in optimizers] if self.job.lr_schedule else []

    def pieces(self, at: RunPosition) -> list[Micro]:
        """Return the microbatches of the step, as they are dealt to replicas."""
        spec = self.spec
        batch = self.reading.batch(epoch=at.epoch, position=at.position, size=spec.global_batch_size)
        parts = [tuple(batch[i : i + spec.micro_batch_size]) for i in range(0, len(batch), spec.micro_batch_size)]
        read = self.reading.read
        return [Micro(samples=part, data=self.cast(read(epoch=at.epoch, part=part))) for part in parts]

    def joined(self, pieces: Sequence[Micro], *, epoch: int) -> list[Micro]:
        """Return the microbatches as normalisation sees them: under sync_bn, those of one round merged into one."""
        width = self.spec.together
        found = []
        for start in range(0, len(pieces), width):
            group = pieces[start : start + width]
            part = tuple(sample for piece in group for sample in piece.samples)
            sizes = [len(piece.samples) for piece in group]
            data = merge_microbatches([piece.data for piece in group], sizes, self._second_reading(epoch, part))
            found.append(Micro(samples=part, data=data))
        return found

    def _second_reading(self, epoch: int, part: tuple[int, ...]) -> Callable[[], Any]:
        return lambda: self.cast(self.reading.read(epoch=epoch, part=part))

    @single_process()
    def gradient(
        self,
        at: RunPosition,
        *,
        pieces: Sequence[Micro] | None = None,
        keep: Collection[str] = (),
        term: str | None = None,
        backwards: bool = False,
        stream: Callable[[int], int] = int,
    ) -> Gradient:
        """Run forward and backward of each microbatch in turn; `backwards` starts with the last one.

        `keep` names the parameters whose parts are kept, of one `term` alone if given. `stream` maps each microbatch to
        the one whose random numbers it draws.
        """
        given = self.joined(self.pieces(at) if pieces is None else pieces, epoch=at.epoch)
        self._number = at.number
        self.model.train()
        known = self.counts_of(self.job, [micro.data for micro in given])
        total: dict[str, Tensor] = {}
        parts: list[dict[str, Tensor]] = [{} for _ in given]
        buffers: list[dict[str, Tensor]] = []
        counts, losses = [0.0] * len(given), [0.0] * len(given)
        term_counts: dict[str, list[float]] = {}
        sums: dict[str, float] = {}
        largest: dict[str, float] = {}
        whole = self.job.loss_over == "batch"
        among = len(given) if whole else 1  # each pass of such a loss gives the loss of the whole batch
        order = range(len(given))[:: -1 if backwards else 1]
        for index, terms in self._passes(given, order, lambda index: self._draw_from(at.step, stream(index))):
            self.model.zero_grad(set_to_none=True)
            for name, (value, count) in terms.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach())
                term_counts.setdefault(name, [0.0] * len(given))[index] = float(count) / among
            if whole:
                known = {name: float(count) for name, (_, count) in terms.items()}
            loss = weighted_loss({n: v for n, v in terms.items() if term in (None, n)}, known)
            (loss * self.spec.loss_scale).backward()
            self._collect(total, parts[index], largest, keep)
            counts[index] = float((terms[term] if term else next(iter(terms.values())))[1]) / among
            losses[index] = float(loss.detach()) / among
            if keep:
                buffers.append({name: b.detach().clone() for name, b in self.model.named_buffers()})
        self.model.zero_grad(set_to_none=True)
        gives_nothing = self.spec.on_empty == "zero"  # a term without a target then adds nothing, if its sum is 0
        empty = [n for n, each in term_counts.items() if not sum(each) and not (gives_nothing and sums[n] == 0.0)]
        divisor = 1.0 if known else sum(counts) or float(gives_nothing)
        return Gradient(
            total={name: value / divisor for name, value in total.items()},
            counts=counts,
            divisor=divisor,
            loss=sum(losses) / divisor if divisor and not empty else float("nan"),
            samples=[micro.samples for micro in given],
            parts=parts if keep else [],
            buffers=buffers,
            term_counts=term_counts,
            largest={name: value / divisor for name, value in largest.items()} if divisor else {},
            empty=empty,
        )

    def statistics(self) -> list[tuple[Tensor, Tensor]]:
        """Return the running statistics of all norms, each buffer with a copy of its value."""
        norms = [module for _, module in norms_with_statistics(self.model)]
        return [(buffer, buffer.clone()) for module in norms for buffer in module.buffers(recurse=False)]

    def skip(self, before: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Restore the `statistics` from before a step that is skipped, as `train` does."""
        for buffer, value in before:
            buffer.copy_(value)

    @single_process()
    def update(self, gradient: Mapping[str, Tensor]) -> None:
        """Clip this gradient and step with it."""
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradient[name].clone() if name in gradient else None
        if self.spec.max_grad_norm is not None:
            self._clip(self.spec.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        if self.job.on_update is not None:
            with torch.no_grad():
                self.job.on_update(self.model, self._number)
        self.average.update(self.model)
        for schedule in self.schedules:
            schedule.step()

    def _clip(self, most: float) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if any(gradient.dtype.itemsize < 4 for gradient in gradients):  # a half-precision norm has only three digits
            norm = torch.stack([gradient.double().norm() for gradient in gradients]).norm()
            nn.utils.clip_grads_with_norm_(self.model.parameters(), most, norm)
            return
        nn.utils.clip_grad_norm_(self.model.parameters(), most)

    def rated(self) -> dict[str, bool]:
        """Return for each parameter whether the learning rate of its group is above 0 now."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        rates = {id(parameter): float(group["lr"]) for group in groups for parameter in group["params"]}
        return {name: rates.get(id(p), 0.0) > 0.0 for name, p in self.model.named_parameters()}

    def weights(self) -> dict[str, Tensor]:
        """Return the weights to compare."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def after(self, at: RunPosition, num_samples: int) -> RunPosition:
        """Return the position of the next step."""
        position = at.position + num_samples
        size = self.spec.global_batch_size
        if self.reading.batch(epoch=at.epoch, position=position, size=size):
            return RunPosition(step=at.number, epoch=at.epoch, position=position)
        return RunPosition(step=at.number, epoch=at.epoch + 1, position=0)

    @single_process()
    def strangers(self, micro: Micro) -> list[str]:
        """Return names (or shapes) of parameters that a backward reaches and the model does not hold."""
        self._draw_from(0, 0)
        terms = self.terms_of(micro.data, len(micro.samples))[1]
        self._calls.clear()
        mine = {id(parameter) for parameter in self.model.parameters()}
        found = [leaf for leaf in leaves_of([total for total, _ in terms.values()]) if id(leaf) not in mine]
        loss = self.job.loss
        named = dict(loss.named_parameters()) if isinstance(loss, nn.Module) else {}
        names = {id(parameter): f"{type(loss).__name__}.{name}" for name, parameter in named.items()}
        return [names.get(id(leaf), f"a parameter {list(leaf.shape)}") for leaf in found]

    @single_process()
    def gives_counts(self, micro: Micro) -> bool:
        """Return True if `loss=` gives a count with each sum."""
        self._draw_from(0, 0)
        output = self._output(micro.data)
        with self.precision():
            return self.job.loss is not None and isinstance(self.job.loss(output, micro.data), Mapping | tuple)

    @single_process()
    def terms_of(self, data: Any, num_samples: int) -> tuple[Any, dict[str, tuple[Tensor, Any]]]:
        """Return output and loss terms of a batch without further processing, for evaluation."""
        return (output := self._output(data)), self._terms(output, data, num_samples)

    def _passes(
        self, given: Sequence[Micro], order: Sequence[int], draw: Callable[[int], None]
    ) -> Iterator[tuple[int, dict[str, tuple[Tensor, Any]]]]:
        """Yield the loss terms of each microbatch.

        For a loss over the batch, each pass gives those of the whole batch, with one microbatch live.
        """
        if self.job.loss_over == "batch":
            data, sizes = [micro.data for micro in given], [len(micro.samples) for micro in given]
            outputs: list[Any] = [None] * len(given)
            for index in order:
                draw(index)
                outputs[index] = self._output(data[index])
            for index in order:
                yield (
                    index,
                    self._terms(
                        part_of(outputs, live=index, sizes=sizes), part_of(data, live=index, sizes=sizes), sum(sizes)
                    ),
                )
            return
        for index in order:
            draw(index)
            yield index, self.terms_of(given[index].data, len(given[index].samples))[1]

    def _output(self, data: Any) -> Any:
        with self.precision():
            return self._forward.output(data)

    def _terms(self, output: Any, data: Any, num_samples: int) -> dict[str, tuple[Tensor, Any]]:
        with self.precision():
            found = self.job.loss(output, data) if self.job.loss else self._forward.own_loss(output, data, num_samples)
        if isinstance(found, Mapping):
            return dict(found)
        return {"loss": found if isinstance(found, tuple) else (found * num_samples, num_samples)}

    def precision(self) -> AbstractContextManager[None]:
        """Return the autocast context of forward, loss and metrics."""
        kind = self.spec.autocast
        return torch.autocast(self.spec.device, kind or torch.bfloat16, enabled=bool(kind), cache_enabled=False)

    def _collect(
        self, total: dict[str, Tensor], part: dict[str, Tensor], largest: dict[str, float], keep: Collection[str]
    ) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                continue
            value = parameter.grad.detach() / self.spec.loss_scale
            total[name] = total[name] + value if name in total else value.clone()
            if name in keep:
                part[name] = value.clone()
            if self.spec.grid and value.numel():
                largest[name] = max(largest.get(name, 0.0), float(value.abs().max()))

    def _draw_from(self, step: int, microbatch: int) -> None:
        self._stream = stream_key(self.spec.seed, step, microbatch)
        self._calls.clear()
        seed_all(self._stream)

    def _seeder(self, block: int) -> Callable[[nn.Module, object], None]:
        def hook(module: nn.Module, _: object) -> None:
            if module.training:
                seed_torch(block_key(self._stream, block=block, call=self._calls.number(block)))

        return hook
