"""The lockstep rung: compare the layout with one process step by step, each time from equal weights."""

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
from paceline.trainer.setup.job_data import build_loader, build_partition
from paceline.verification.compare_step import StepComparison
from paceline.verification.diagnosis.gradient_diagnosis import sample_elements
from paceline.verification.diagnosis.local_gradients import (
    can_run_locally,
    compute_local_gradients,
    gather_local_gradients,
)
from paceline.verification.diagnosis.module_outputs import first_differing_module, record_layout_outputs
from paceline.verification.diagnosis.observed_step import ObservedStep
from paceline.verification.diagnosis.rank_names import RankNames
from paceline.verification.gather_copies import distribute_full_tensor, gather_copies, shard_distances
from paceline.verification.reference.dropout_isolation import without_dropout
from paceline.verification.reference.reference import Reference, RunPosition
from paceline.verification.reference.reference_step import run_reference_step
from paceline.verification.reference.sample_reader import num_rows
from paceline.verification.reference.step_coverage import CoverageRecorder
from paceline.verification.rung_result import DIFFERENT, RungResult

ReportProgress = Callable[[str], None]


class LockstepComparison:
    """A lockstep comparison that runs on every rank; rank 0 holds the reference and forms the verdict."""

    def __init__(self, *, setup: TrainingSetup, reference: Reference | None, report_progress: ReportProgress) -> None:
        self._setup = setup
        self._world = setup.world
        self._reference = reference
        self._report_progress = report_progress
        self._last_gradient: Mapping[str, Tensor] = {}  # the reference's gradient in the step before
        self._had_positive_lr: dict[str, bool] = {}  # by parameter with a gradient: was its learning rate ever above 0?
        self._has_compared_update = self._has_changed_weights = self._had_zero_lr = False
        self._coverage: CoverageRecorder | None = None
        self.rung_result = RungResult()

    def run(self, cursors: Sequence[Cursor]) -> RungResult:
        """Compare the step at each cursor until one differs, and return the result on every rank."""
        if self._reference is not None:
            self._coverage = CoverageRecorder(self._reference, replicas=self._setup.plan.replicas)
        self._compare_initial_state()
        for number, cursor in enumerate(cursors, 1):
            position = RunPosition(steps_done=cursor.step, epoch=cursor.epoch, batch_start=cursor.position)
            suffix = ", the epoch's short last batch" if position.step_number > number else ""
            self._report_progress(
                f"step {position.step_number}{suffix} ({number} of the {len(cursors)} that are compared)"
            )
            self._compare_step(cursor, position)
            if self._world.share_json(self.rung_result.first_difference is not None):
                break
        if self._reference is not None and self.rung_result.first_difference is None:
            self.rung_result.record_uncovered(self._untested_note(self._reference, steps=len(cursors)))
        if self._coverage is not None:
            self.rung_result.coverage = self._coverage.as_json()
        shared_result: RungResult = RungResult(**self._world.share_json(vars(self.rung_result)))
        return shared_result

    def _untested_note(self, reference: Reference, *, steps: int) -> str:
        """Return a note about what the compared steps did not test; empty if they tested everything."""
        if not self._has_compared_update:
            return "gradients and weights: no compared step has a finite gradient in one process"
        has_changed = (
            self._had_positive_lr if self._has_changed_weights else dict.fromkeys(self._had_positive_lr, False)
        )
        has_positive_lr = reference.positive_lr_by_parameter()
        lr_rises = self._had_zero_lr and any(
            has_positive_lr[name] for name, changed in has_changed.items() if not changed
        )
        return unchanged_weights_note(has_changed, steps=steps, lr_rises=lr_rises)

    def _compare_initial_state(self) -> None:
        """Compare the initial weights and buffers on every rank."""
        expected = {} if self._reference is None else _named_tensors(self._reference.model)
        distances = shard_distances(self._local_tensors(), expected, sharded=self._setup.weights, world=self._world)
        for name, distance_by_rank in distances.items() if self._reference is not None else ():
            self.rung_result.record(DIFFERENT, difference=max(distance_by_rank.values()))
            self.rung_result.record_difference(
                step=1, parameter=name, cause=self._initial_difference_cause(name, list(distance_by_rank))
            )
            return

    def _initial_difference_cause(self, name: str, ranks: Sequence[int]) -> str:
        """Return the likely cause of an initial tensor that differs on `ranks` from the tensor of one process."""
        rank_list = ", ".join(map(str, ranks))
        if name not in self._setup.weights.parameter_names:
            return (
                f"unequal initial buffers on rank {rank_list}: a forward before the first step (used to plan a layout) "
                "has written to it, or the build is not repeatable"
            )
        reason = "the build is not repeatable" if 0 in ranks else "not built from the same seed, nor broadcast"
        return f"unequal initial weights on rank {rank_list}: {reason}"

    def _compare_step(self, cursor: Cursor, position: RunPosition) -> None:
        self._load_reference_state()
        try:
            step_input = self._read_step_input(cursor)
        except DesyncError as error:  # raised on every rank
            self.rung_result.record_difference(
                step=position.step_number, parameter="(data)", cause=f"data order: {error.what.rstrip('.')}"
            )
            return
        self._setup.step.steps_done = cursor.step
        comparison, statistics = None, []
        if self._reference is not None:
            statistics = self._reference.copy_statistics()
            rank_names = RankNames(mesh=self._setup.worlds.mesh, sharded=self._setup.optim_shards)
            comparison = StepComparison(
                run_reference_step(self._reference, position),
                rung_result=self.rung_result,
                last_gradient=self._last_gradient,
                rank_names=rank_names,
            )
        self._compare_forward_backward(step_input, comparison)
        if self._world.share_json(comparison is not None and comparison.needs_dropout_rerun):
            self._rerun_without_dropout(step_input, comparison)
        expected_gradient = {} if comparison is None else comparison.expected_gradient
        if self._world.share_json(comparison is None or comparison.is_finite):
            if comparison is not None and self._coverage is not None:
                comparison.record_coverage(self._coverage)
            self._compare_update(expected_gradient, comparison, cursor.step)
            self._last_gradient = expected_gradient
        elif self._reference is not None:
            self._reference.restore_statistics(statistics)

    def _compare_forward_backward(self, step_input: StepInput, comparison: StepComparison | None) -> None:
        model = self._setup.model
        model.train()
        result = self._setup.step.compute_gradients(step_input)
        self._check_counts(result)
        local_microbatches = [
            [m.index, list(m.indices), checksum(m.data, 0), num_rows(m.data)] for m in step_input.micro
        ]
        microbatches = self._gather_read_microbatches(local_microbatches)
        losses = self._world.gather_json(result.loss)
        gradients = self._gather_gradients()
        buffers = self._gather_buffers()
        if comparison is not None:
            observed = ObservedStep(
                gradients=gradients,
                buffers=buffers,
                losses=losses,
                executed_microbatches=[index for index, _, _, _ in microbatches],
                samples={index: samples for index, samples, _, _ in microbatches},
                contents={index: content for index, _, content, _ in microbatches},
                row_counts={index: number for index, _, _, number in microbatches},
                replicas=self._setup.worlds.data.world_size,
            )
            comparison.compare_forward_backward(observed)
        self._compare_local_gradients(step_input, comparison, gradients)
        self._compare_module_outputs(step_input, comparison)

    def _gather_read_microbatches(self, local_microbatches: list[Any]) -> list[Any]:
        """Gather the microbatches of all replicas; record a difference if ranks of one replica read different samples.

        A microbatch is a list: its index, its samples, a checksum of its data, and its number of rows.
        """
        microbatches_by_replica: dict[int, list[Any]] = {}
        for rank, (replica, microbatches) in enumerate(
            self._world.gather_json([self._setup.worlds.data.rank, local_microbatches])
        ):
            if microbatches_by_replica.setdefault(replica, microbatches) != microbatches:
                cause = f"data order: rank {rank} read different samples than the other ranks of replica {replica}"
                self.rung_result.record_difference(
                    step=self._setup.step.steps_done + 1, parameter="(data)", cause=cause
                )
        return [row for rows in microbatches_by_replica.values() for row in rows]

    def _check_counts(self, result: StepResult) -> None:
        """Record a difference if `train` would refuse the counts of the step. All ranks have equal counts."""
        try:
            result.totals.check_counts()
        except JobError as error:
            self.rung_result.record_difference(
                step=self._setup.step.steps_done + 1, parameter="(count)", cause=error.what.rstrip(".")
            )

    def _compare_local_gradients(
        self, step_input: StepInput, comparison: StepComparison | None, gradients: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Compute the unexplained gradients on each rank without reduction, and compare them with the reference."""
        names, global_counts = self._world.share_json(
            None if comparison is None else (comparison.unexplained, comparison.global_counts)
        ) or ((), None)
        if not names or not can_run_locally(self._setup):
            return
        self._load_reference_state()
        local_gradients = compute_local_gradients(self._setup, step_input, names=names, global_counts=global_counts)
        if not all(self._world.gather_json(local_gradients is not None)) or local_gradients is None:
            return
        targets = {m.name: m.parameter for m in self._setup.named_parameters}
        size = sum(sample_elements(targets[name]).numel() for name in names)
        gathered = gather_local_gradients(self._setup, local_gradients, num_micro=step_input.num_micro, size=size)
        if comparison is not None:
            comparison.compare_local_gradients(gathered, gradients, replicas=self._world.world_size)

    def _compare_module_outputs(self, step_input: StepInput, comparison: StepComparison | None) -> None:
        """Find the first module whose output differs, to explain a gradient that is still unexplained.

        Nothing is done if the layout neither shards the model nor uses remat.
        """
        plan, worlds = self._setup.plan, self._setup.worlds
        remat = plan.asked.remat != "none"
        is_unexplained = self._world.share_json(comparison is not None and bool(comparison.unexplained))
        if not is_unexplained or not (remat or set(worlds.mesh.split_axes) - {"dp_replicate"}):
            return
        num_microbatches = min(worlds.data.world_size, step_input.num_micro)
        reference_outputs = None if comparison is None else comparison.record_module_outputs(num_microbatches)
        self._load_reference_state()
        layout_outputs = record_layout_outputs(self._setup, step_input, microbatches=num_microbatches)
        difference = first_differing_module(self._setup, layout_outputs, reference_outputs)
        if comparison is not None:
            comparison.report_module_outputs(difference, remat=remat)

    def _rerun_without_dropout(self, step_input: StepInput, comparison: StepComparison | None) -> None:
        """Run the step again without dropout, in the layout and in the reference."""
        models = [*self._setup.models] if self._reference is None else [*self._setup.models, self._reference.model]
        with without_dropout(models):
            self._load_reference_state()
            self._setup.step.compute_gradients(step_input)
            gradients = self._gather_gradients()
            if comparison is not None:
                comparison.report_dropout_rerun(gradients)
        self._load_reference_state()

    def _gather_gradients(self) -> list[dict[str, Tensor]]:
        named, scaler = self._setup.named_parameters, self._setup.update.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        local_gradients = {m.name: m.parameter.grad.detach() / scale for m in named if m.parameter.grad is not None}
        return gather_copies(local_gradients, sharded=self._setup.optim_shards, world=self._world)

    def _gather_buffers(self) -> list[dict[str, Tensor]]:
        names = [name for name, _ in self._setup.model.named_buffers()]
        local_buffers = {name: tensor for name, tensor in self._local_tensors().items() if name in names}
        return gather_copies(local_buffers, sharded=self._setup.weights, world=self._world, names=names)

    def _local_tensors(self) -> dict[str, Tensor]:
        """Return this rank's shard of every parameter and buffer."""
        local_tensors = self._setup.weights.local_tensors.values()
        return {local.name: local.tensor for local in local_tensors if local.tensor is not None}

    def _load_reference_state(self) -> None:
        """Copy the reference's weights and buffers to every rank."""
        source = {} if self._reference is None else _named_tensors(self._reference.model)
        with torch.no_grad():
            for name, local in self._setup.weights.local_tensors.items():
                value = distribute_full_tensor(name, source.get(name), sharded=self._setup.weights, world=self._world)
                if local.tensor is not None and value is not None:
                    copy_into(local.tensor, value)
        self._setup.step.replica.buffers.accept_current_values()  # this copy has written the buffers, not a forward

    def _read_step_input(self, cursor: Cursor) -> StepInput:
        loader = build_layout_loader(self._setup, cursor)
        try:
            return next(iter(loader))
        finally:
            loader.close()

    def _compare_update(
        self, expected_gradient: Mapping[str, Tensor], comparison: StepComparison | None, step: int
    ) -> None:
        """Step the layout's and the reference's optimizers with the reference's gradient, and compare the weights."""
        names = set(self._world.share_json(sorted(expected_gradient)))
        optim_shards, weights = self._setup.optim_shards, self._setup.weights
        weights_before = (
            {}
            if self._reference is None
            else {n: t.detach().clone() for n, t in _named_tensors(self._reference.model).items()}
        )
        values = {
            name: distribute_full_tensor(name, expected_gradient.get(name), sharded=optim_shards, world=self._world)
            for name in optim_shards.names
            if name in names
        }
        for member in self._setup.named_parameters:
            member.parameter.grad = values.get(member.name)
        scaler, self._setup.update.scaler = self._setup.update.scaler, None  # this gradient is not scaled
        norm, _ = self._setup.update.commit(step=step + 1, loss=0.0)
        self._setup.update.scaler = scaler
        norms = self._world.gather_json(None if norm is None else float(norm))
        copies = gather_copies(self._local_tensors(), sharded=weights, world=self._world, names=optim_shards.names)
        if self._reference is None or comparison is None:
            return
        has_positive_lr, self._has_compared_update = self._reference.positive_lr_by_parameter(), True
        self._had_zero_lr = not all(has_positive_lr.values())
        if self._coverage is not None:
            self._coverage.record_update(expected_gradient)
        self._reference.update(expected_gradient)
        for name, value in self._reference.weights().items():
            if name in expected_gradient and bool(expected_gradient[name].any()):
                self._had_positive_lr[name] = self._had_positive_lr.get(name, False) or has_positive_lr[name]
                self._has_changed_weights = self._has_changed_weights or not torch.equal(value, weights_before[name])
        comparison.compare_norms(norms)
        rank_names = RankNames(mesh=self._setup.worlds.mesh, sharded=weights)
        for copy, weights_after in enumerate(copies):
            distinct_weights = {n: t for n, t in weights_after.items() if copy == 0 or t is not copies[0][n]}
            location = f", on rank {copy}" if copy else ""
            comparison.compare_weights(
                weights_before=weights_before,
                weights_after=distinct_weights,
                location=location,
                rank_names=rank_names,
                copy=copy,
            )


def unchanged_weights_note(has_changed: Mapping[str, bool], *, steps: int, lr_rises: bool) -> str:
    """Return a note about weights whose update was not tested, because no step changed them; empty if there are none.

    `has_changed` has an entry for each weight with a gradient. The entry is False if the weight's learning rate was 0
    in every step. All entries are False if no step changed any weight.
    `lr_rises`: the learning rate of some unchanged weights is above 0 in the next step.
    """
    unchanged = [name for name, changed in has_changed.items() if not changed]
    if not unchanged:
        return ""
    subject = (
        "the weights"
        if len(unchanged) == len(has_changed)
        else f"{len(unchanged)} of {len(has_changed)} weights ({unchanged[0]} first)"
    )
    hint = f". Hint: --steps {2 * steps}, because the learning rate is above 0 after these steps" if lr_rises else ""
    return (
        f"{subject}: no step changed them (the learning rate is 0 or too small), so their update was not tested{hint}"
    )


def build_layout_loader(setup: TrainingSetup, cursor: Cursor) -> BatchLoader:
    """Return the layout's own loader, starting at `cursor`."""
    settings = setup.settings
    return build_loader(
        setup.data,
        settings,
        partition=build_partition(setup.plan, settings, setup.worlds.data),
        cursor=cursor,
        sample_seeds=settings.data.sample_seeds,
        shards=settings.data.shards,
        gather_json=setup.world.gather_json,
    )


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
