"""The reference: a naive one-process run with which every layout is compared.

It is written without the loader, the step and the parallelism, so that it does not repeat their faults. It shares two
definitions with them: the order of samples, and the keys of the random streams. It also shares small helpers, such as
the function that lists the normalisation layers.
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
from paceline.verification.reference.forward import ReferenceForward
from paceline.verification.reference.loss_terms import reachable_parameters, sum_target_counts, weighted_loss
from paceline.verification.reference.process_group_isolation import single_process
from paceline.verification.reference.sample_reader import open_sample_reader
from paceline.verification.reference.weight_average import WeightAverage
from paceline.verification.reference.whole_batch import merge_microbatches, merge_with_one_attached


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The properties of the run that the reference depends on."""

    seed: int
    global_batch_size: int
    micro_batch_size: int
    max_grad_norm: float | None = None
    drop_last: bool = False
    autocast: torch.dtype | None = None
    sample_seeds: str = "auto"
    merged_microbatches: int = 1
    """How many microbatches normalisation treats as one."""
    lr_factor: float = 1.0
    device: str = "cpu"
    grid_step: float = 0.0
    """The step of exact mode's integers, relative to the largest element of a gradient; 0 without exact mode."""
    shards: int | None = None
    loss_scale: float = 1.0
    """The factor of the loss in backward, which keeps small gradients above fp16's smallest number."""
    workers: int = 0
    is_sliced: bool = False
    """Whether the layout computes a microbatch in slices that are rounded separately (tp, cp, ep, sync_bn)."""
    uses_other_kernels: bool = False
    """Whether attention or normalisation uses another formula than one process does (cp, sync_bn)."""
    on_empty: str = "stop"
    """The effect of a loss term without a target: `stop`, or `zero`, which adds nothing to loss and gradient."""


@dataclass(frozen=True, kw_only=True)
class RunPosition:
    """A position in the run: the number of finished steps, and the epoch and first sample of the next batch."""

    steps_done: int
    epoch: int
    batch_start: int

    @property
    def step_number(self) -> int:
        """The number of the next step, counted from 1."""
        return self.steps_done + 1


@dataclass(frozen=True, kw_only=True)
class ReferenceMicrobatch:
    """A microbatch: its samples, read and collated."""

    samples: tuple[int, ...]
    data: Any


@dataclass(frozen=True, kw_only=True)
class ReferenceGradient:
    """The gradient of one step."""

    total: dict[str, Tensor]
    counts: list[float]
    """The count of each microbatch."""
    divisor: float
    """The number by which the sum of the contributions is divided."""
    loss: float
    samples: list[tuple[int, ...]]
    """The indices of the samples, by microbatch."""
    contributions: list[dict[str, Tensor]] = field(default_factory=list)
    """If requested, the gradients of each microbatch before the division by `divisor`.

    If the global counts are known before backward (`count=`, or a loss over the batch), backward already gives
    gradients that are divided by these counts, and `divisor` is 1.
    """
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    """If requested, the buffers after each microbatch."""
    term_counts: dict[str, list[float]] = field(default_factory=dict)
    """The counts of each term, by microbatch."""
    max_abs: dict[str, float] = field(default_factory=dict)
    """For exact mode, by parameter: the largest element of a microbatch's gradient, divided by the divisor."""
    empty_terms: list[str] = field(default_factory=list)
    """The terms without a target that prevent a step.

    In such a step `train` stops, or skips the step if `train.on_nonfinite` is "skip". A term that counts as zero
    (`on_empty`) prevents nothing, and is not listed.
    """

    @property
    def counts_text(self) -> str:
        """Text with the count of the step, or of each of its loss terms."""
        if len(self.term_counts) < 2:
            return f"its count is {sum(self.counts):g}"
        return "its counts are " + ", ".join(f"{sum(counts):g} of {name}" for name, counts in self.term_counts.items())


class Reference:
    """The one-process training run."""

    compute_counts = staticmethod(sum_target_counts)
    """The function that returns the counts of the step, or None if they are not known before the forward."""
    _microbatch_seed = 0

    @single_process()
    def __init__(self, *, job: Job, config: ReferenceConfig, cast: Callable[[Any], Any]) -> None:
        self.job = job
        self.config = config
        self.cast = cast
        seed_all(stream_key(config.seed, "build"))
        self.model: nn.Module = job.model().to(config.device)
        self._forward = ReferenceForward(job, self.model)
        self.average = WeightAverage(self.model, decay=job.ema)
        self._step_number = 0
        self._call_counter = BlockCallCounter()
        for number, block in enumerate(random_blocks(self.model)):
            block.register_forward_pre_hook(self._block_seed_hook(number))
        self.optimizers, self.lr_schedulers = self._create_optimizers_and_schedulers()
        self.reader = open_sample_reader(
            job=job,
            workers=config.workers,
            seed=config.seed,
            drop_last=config.drop_last,
            sample_seeds=config.sample_seeds,
            batch=config.global_batch_size,
            shards=config.shards,
        )

    def rebuild(self) -> "Reference":
        """Return a new reference at the start of the run."""
        return self.with_config()

    def with_config(self, **changes: Any) -> "Reference":
        """Return a new reference at the start of the run, with these changes to its `ReferenceConfig`."""
        return Reference(job=self.job, config=replace(self.config, **changes), cast=self.cast)

    def without_compression(self) -> "Reference":
        """Return a reference that does not compress its gradients."""
        return self

    def _create_optimizers_and_schedulers(self) -> tuple[list[Optimizer], list[Any]]:
        created = self.job.optimizer([(n, p) for n, p in self.model.named_parameters() if p.requires_grad])
        optimizers = list(created) if isinstance(created, list | tuple) else [created]
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["lr"] * self.config.lr_factor if self.config.lr_factor != 1.0 else group["lr"]
        return optimizers, [self.job.lr_schedule(o) for o in optimizers] if self.job.lr_schedule else []

    def read_microbatches(self, position: RunPosition) -> list[ReferenceMicrobatch]:
        """Read the microbatches of the step, in the order in which replicas get them."""
        config = self.config
        batch = self.reader.batch(epoch=position.epoch, position=position.batch_start, size=config.global_batch_size)
        sample_groups = [
            tuple(batch[i : i + config.micro_batch_size]) for i in range(0, len(batch), config.micro_batch_size)
        ]
        read = self.reader.read
        return [
            ReferenceMicrobatch(samples=part, data=self.cast(read(epoch=position.epoch, indices=part)))
            for part in sample_groups
        ]

    def merge_for_normalization(
        self, microbatches: Sequence[ReferenceMicrobatch], *, epoch: int
    ) -> list[ReferenceMicrobatch]:
        """Merge each group of microbatches that normalisation sees as one; without sync_bn, a group has only one."""
        group_size = self.config.merged_microbatches
        merged = []
        for start in range(0, len(microbatches), group_size):
            group = microbatches[start : start + group_size]
            samples = tuple(sample for micro in group for sample in micro.samples)
            sizes = [len(micro.samples) for micro in group]
            data = merge_microbatches([micro.data for micro in group], sizes, self._make_reader(epoch, samples))
            merged.append(ReferenceMicrobatch(samples=samples, data=data))
        return merged

    def _make_reader(self, epoch: int, samples: tuple[int, ...]) -> Callable[[], Any]:
        return lambda: self.cast(self.reader.read(epoch=epoch, indices=samples))

    @single_process()
    def compute_gradient(
        self,
        position: RunPosition,
        *,
        microbatches: Sequence[ReferenceMicrobatch] | None = None,
        keep_contributions: Collection[str] = (),
        term: str | None = None,
        reverse_order: bool = False,
        random_microbatch: Callable[[int], int] = int,
    ) -> ReferenceGradient:
        """Run forward and backward of each microbatch in turn; `reverse_order` starts with the last microbatch.

        `keep_contributions` are the parameters whose gradients are also returned by microbatch. `term` is the loss term
        to differentiate (None: all). Microbatch i draws the random numbers of microbatch `random_microbatch(i)`.
        """
        merged = self.merge_for_normalization(
            self.read_microbatches(position) if microbatches is None else microbatches, epoch=position.epoch
        )
        step, self._step_number = position.steps_done, position.step_number
        self.model.train()
        global_counts = self.compute_counts(self.job, [micro.data for micro in merged])
        total, buffers = dict[str, Tensor](), list[dict[str, Tensor]]()
        contributions: list[dict[str, Tensor]] = [{} for _ in merged]
        counts, losses = [0.0] * len(merged), [0.0] * len(merged)
        term_counts, sums, max_abs = dict[str, list[float]](), dict[str, float](), dict[str, float]()
        is_batch_loss = self.job.loss_over == "batch"
        num_passes = len(merged) if is_batch_loss else 1  # each pass then gives the loss of the whole batch
        order = range(len(merged))[:: -1 if reverse_order else 1]
        for index, terms in self._run_passes(
            merged, order, lambda i: self._seed_microbatch(step, random_microbatch(i))
        ):
            self.model.zero_grad(set_to_none=True)
            for name, (value, count) in terms.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach())
                term_counts.setdefault(name, [0.0] * len(merged))[index] = float(count) / num_passes
            if is_batch_loss:
                global_counts = {name: float(count) for name, (_, count) in terms.items()}
            loss = weighted_loss({n: v for n, v in terms.items() if term in (None, n)}, global_counts)
            (loss * self.config.loss_scale).backward()
            self._accumulate(total, contributions[index], max_abs, keep_contributions)
            counts[index] = float((terms[term] if term else next(iter(terms.values())))[1]) / num_passes
            losses[index] = float(loss.detach()) / num_passes
            if keep_contributions:
                buffers.append({name: b.detach().clone() for name, b in self.model.named_buffers()})
        self.model.zero_grad(set_to_none=True)
        ignores_empty = self.config.on_empty == "zero"  # a term without a target then adds nothing, if its sum is 0
        empty_terms = [n for n, c in term_counts.items() if not sum(c) and not (ignores_empty and sums[n] == 0.0)]
        divisor = 1.0 if global_counts else sum(counts) or float(ignores_empty)
        return ReferenceGradient(
            total={name: value / divisor for name, value in total.items()},
            counts=counts,
            divisor=divisor,
            loss=sum(losses) / divisor if divisor and not empty_terms else float("nan"),
            samples=[micro.samples for micro in merged],
            contributions=contributions if keep_contributions else [],
            buffers=buffers,
            term_counts=term_counts,
            max_abs={name: value / divisor for name, value in max_abs.items()} if divisor else {},
            empty_terms=empty_terms,
        )

    def copy_statistics(self) -> list[tuple[Tensor, Tensor]]:
        """Return the running statistics of all normalisation layers, as pairs of a buffer and a copy of it."""
        norms = [module for _, module in norms_with_statistics(self.model)]
        return [(buffer, buffer.clone()) for module in norms for buffer in module.buffers(recurse=False)]

    def restore_statistics(self, statistics: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Restore the running statistics from before a step that is skipped, as `train` does."""
        for buffer, value in statistics:
            buffer.copy_(value)

    @single_process()
    def update(self, gradient: Mapping[str, Tensor]) -> None:
        """Clip this gradient, and step the optimizers with it."""
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradient[name].clone() if name in gradient else None
        if self.config.max_grad_norm is not None:
            self._clip_gradients(self.config.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        if self.job.on_update is not None:
            with torch.no_grad():
                self.job.on_update(self.model, self._step_number)
        self.average.update(self.model)
        for scheduler in self.lr_schedulers:
            scheduler.step()

    def _clip_gradients(self, max_norm: float) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if any(gradient.dtype.itemsize < 4 for gradient in gradients):  # a half-precision norm has only three digits
            norm = torch.stack([gradient.double().norm() for gradient in gradients]).norm()
            nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)
            return
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def positive_lr_by_parameter(self) -> dict[str, bool]:
        """Return for each parameter whether the current learning rate of its group is above 0."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        rates = {id(parameter): float(group["lr"]) for group in groups for parameter in group["params"]}
        return {name: rates.get(id(p), 0.0) > 0.0 for name, p in self.model.named_parameters()}

    def weights(self) -> dict[str, Tensor]:
        """Return the weights to compare."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def next_position(self, position: RunPosition, num_samples: int) -> RunPosition:
        """Return the position of the next step."""
        batch_start = position.batch_start + num_samples
        size = self.config.global_batch_size
        if self.reader.batch(epoch=position.epoch, position=batch_start, size=size):
            return RunPosition(steps_done=position.step_number, epoch=position.epoch, batch_start=batch_start)
        return RunPosition(steps_done=position.step_number, epoch=position.epoch + 1, batch_start=0)

    @single_process()
    def foreign_parameters(self, micro: ReferenceMicrobatch) -> list[str]:
        """Return the names (or shapes) of parameters that backward reaches, but that are not the model's."""
        self._seed_microbatch(0, 0)
        terms = self.forward_batch(micro.data, len(micro.samples))[1]
        self._call_counter.clear()
        model_ids = {id(parameter) for parameter in self.model.parameters()}
        foreign = [
            leaf for leaf in reachable_parameters([total for total, _ in terms.values()]) if id(leaf) not in model_ids
        ]
        loss = self.job.loss
        loss_parameters = loss.named_parameters() if isinstance(loss, nn.Module) else ()
        names = {id(parameter): f"{type(loss).__name__}.{name}" for name, parameter in loss_parameters}
        return [names.get(id(leaf), f"a parameter {list(leaf.shape)}") for leaf in foreign]

    @single_process()
    def returns_counts(self, micro: ReferenceMicrobatch) -> bool:
        """Return True if `loss=` returns a count with each sum."""
        self._seed_microbatch(0, 0)
        output = self._compute_output(micro.data)
        with self.autocast():
            return self.job.loss is not None and isinstance(self.job.loss(output, micro.data), Mapping | tuple)

    @single_process()
    def forward_batch(self, data: Any, num_samples: int) -> tuple[Any, dict[str, tuple[Tensor, Any]]]:
        """Run the forward of a batch, and return its output and loss terms."""
        return (output := self._compute_output(data)), self._compute_terms(output, data, num_samples)

    def _run_passes(
        self, microbatches: Sequence[ReferenceMicrobatch], order: Sequence[int], seed: Callable[[int], None]
    ) -> Iterator[tuple[int, dict[str, tuple[Tensor, Any]]]]:
        """Yield the index and the loss terms of each microbatch. A term is a pair of a sum and a count.

        For a loss over the batch, each pass yields the terms of the whole batch, with gradients of one microbatch only.
        """
        if self.job.loss_over == "batch":
            data, sizes = [micro.data for micro in microbatches], [len(micro.samples) for micro in microbatches]
            outputs: list[Any] = [None] * len(microbatches)
            for index in order:
                seed(index)
                outputs[index] = self._compute_output(data[index])
            for index in order:
                yield (
                    index,
                    self._compute_terms(
                        merge_with_one_attached(outputs, attached_index=index, sizes=sizes),
                        merge_with_one_attached(data, attached_index=index, sizes=sizes),
                        sum(sizes),
                    ),
                )
            return
        for index in order:
            seed(index)
            yield index, self.forward_batch(microbatches[index].data, len(microbatches[index].samples))[1]

    def _compute_output(self, data: Any) -> Any:
        with self.autocast():
            return self._forward.compute_output(data)

    def _compute_terms(self, output: Any, data: Any, num_samples: int) -> dict[str, tuple[Tensor, Any]]:
        with self.autocast():
            returned = (
                self.job.loss(output, data) if self.job.loss else self._forward.model_loss(output, data, num_samples)
            )
        if isinstance(returned, Mapping):
            return dict(returned)
        return {"loss": returned if isinstance(returned, tuple) else (returned * num_samples, num_samples)}

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context of forward, loss and metrics."""
        autocast_dtype = self.config.autocast
        return torch.autocast(
            self.config.device, autocast_dtype or torch.bfloat16, enabled=bool(autocast_dtype), cache_enabled=False
        )

    def _accumulate(
        self,
        total: dict[str, Tensor],
        contribution: dict[str, Tensor],
        max_abs: dict[str, float],
        keep_contributions: Collection[str],
    ) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                continue
            value = parameter.grad.detach() / self.config.loss_scale
            total[name] = total[name] + value if name in total else value.clone()
            if name in keep_contributions:
                contribution[name] = value.clone()
            if self.config.grid_step and value.numel():
                max_abs[name] = max(max_abs.get(name, 0.0), float(value.abs().max()))

    def _seed_microbatch(self, step: int, microbatch: int) -> None:
        self._microbatch_seed = stream_key(self.config.seed, step, microbatch)
        self._call_counter.clear()
        seed_all(self._microbatch_seed)

    def _block_seed_hook(self, block: int) -> Callable[[nn.Module, object], None]:
        def hook(module: nn.Module, _: object) -> None:
            if module.training:
                seed_torch(block_key(self._microbatch_seed, block=block, call=self._call_counter.call_number(block)))

        return hook
