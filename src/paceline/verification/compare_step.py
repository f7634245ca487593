"""Compare a step of all ranks with the reference, on rank 0: data, loss, gradients, buffers and update."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from paceline.parallel.batchnorm.norm_tape import norms_with_statistics
from paceline.verification.diagnosis.difference_location import (
    describe_copy,
    describe_gradient_ranks,
    describe_weight_ranks,
    sort_by_severity,
)
from paceline.verification.diagnosis.gradient_diagnosis import GradientDiagnosis
from paceline.verification.diagnosis.local_gradients import MAX_NAMES, flatten_gradients, local_gradient_cause
from paceline.verification.diagnosis.module_outputs import (
    ModuleOutputs,
    dropout_location,
    module_output_cause,
    record_reference_outputs,
)
from paceline.verification.diagnosis.observed_step import ObservedStep, find_data_difference
from paceline.verification.diagnosis.placement_cause import GradientCase, placement_cause
from paceline.verification.diagnosis.rank_names import RankNames
from paceline.verification.diagnosis.update_cause import norm_cause, update_cause
from paceline.verification.reference.dropout_isolation import has_dropout
from paceline.verification.reference.reference_step import ReferenceStep, Tensors
from paceline.verification.reference.step_coverage import CoverageRecorder
from paceline.verification.rung_result import DIFFERENT, RungResult, judge_distance
from paceline.verification.tensor_distance import euclidean_distance, euclidean_norm, machine_epsilon, to_double

_UPDATE_EPS, _UPDATE_EPS_HALF = 64.0, 2.0  # allowed difference of updated weights, in machine epsilons


class StepComparison:
    """The comparison of one step with the reference: forward and backward first, then the weights after the update."""

    def __init__(
        self,
        reference_step: ReferenceStep,
        *,
        rung_result: RungResult,
        last_gradient: Tensors | None = None,
        rank_names: RankNames | None = None,
    ) -> None:
        self._step = reference_step
        self._reference = reference_step.reference
        self._position = reference_step.position
        self._rank_names = rank_names
        self._rung_result = rung_result
        self._location = ""  # where random numbers differ, if a rerun has shown it
        self._diagnosis = GradientDiagnosis(reference_step, last_gradient=last_gradient or {}, rank_names=rank_names)
        self._losses: Sequence[float] = ()
        self._differing_names: Sequence[str] = ()

    @property
    def expected_gradient(self) -> Tensors:
        """The reference's gradient."""
        return self._step.gradient.total

    @property
    def is_finite(self) -> bool:
        """True if the gradient of one process is finite."""
        return all(bool(torch.isfinite(value).all()) for value in self.expected_gradient.values())

    @property
    def needs_dropout_rerun(self) -> bool:
        """True if a gradient is unexplained and the model has dropout. A rerun without dropout may show the cause."""
        return bool(self._diagnosis.unexplained) and has_dropout(self._reference.model)

    def compare_forward_backward(self, observed: ObservedStep) -> None:
        """Compare data, buffers, gradients and loss with the reference, and record the first difference."""
        data_cause = find_data_difference(observed, microbatches=self._step.microbatches, rank_names=self._rank_names)
        if data_cause is not None:
            self._rung_result.record_difference(step=self._position.step_number, parameter="(data)", cause=data_cause)
        if not self.is_finite:
            self._compare_nonfinite(observed.gradients)
            return
        empty_terms = ", ".join(self._step.gradient.empty_terms)
        if empty_terms:
            self._rung_result.detail += (
                f" Step {self._position.step_number} has no target of {empty_terms}: train stops there, or skips the "
                "step (train.on_nonfinite)."
            )
        folded_prefixes = {f"{name}." for name, _ in norms_with_statistics(self._reference.model)}
        forward_buffers = {
            name for name, _ in self._reference.model.named_buffers() if not name.startswith(tuple(folded_prefixes))
        }
        self._losses = observed.losses
        # Buffers that the forward reads come before the gradients, because a wrong buffer explains wrong gradients.
        # Running statistics do not, so they are compared last.
        self._compare_buffers(observed.buffers, forward_buffers)
        self._compare_gradients(observed, is_data_correct=data_cause is None)
        self._compare_losses(observed.losses)
        if self._step.is_rounding_dominated:
            self._rung_result.record_uncovered(
                f"gradients of step {self._position.step_number} in half precision: rounding changes them too much"
            )
        self._compare_buffers(
            observed.buffers, {name for name, _ in self._reference.model.named_buffers()} - forward_buffers
        )

    def _compare_nonfinite(self, copies: Sequence[Tensors]) -> None:
        """Report a copy of the model whose gradient is finite although the one-process gradient is not."""
        for copy, gradients in enumerate(copies):
            if all(bool(torch.isfinite(value).all()) for value in gradients.values()):
                location = describe_copy(next(iter(self.expected_gradient)), copy, rank_names=self._rank_names)
                counts_text = self._step.gradient.counts_text
                cause = f"finite on {location}, but not in one process ({counts_text})"
                self._rung_result.record_difference(
                    step=self._position.step_number, parameter=next(iter(self.expected_gradient)), cause=cause
                )
                return
        self._rung_result.detail += (
            f" The gradient of step {self._position.step_number} is not finite, in one process and here "
            f"({self._step.gradient.counts_text}): train.on_nonfinite decides what train does."
        )

    @property
    def unexplained(self) -> list[str]:
        """The first `MAX_NAMES` parameters whose gradient is not explained yet, worst first."""
        return self._diagnosis.unexplained[:MAX_NAMES]

    @property
    def global_counts(self) -> dict[str, float] | None:
        """The global counts by loss term; None if the job does not give them before the forward."""
        return self._step.global_counts

    def compare_local_gradients(
        self, local_gradients: Mapping[int, torch.Tensor], gradients: Sequence[Tensors], *, replicas: int | None = None
    ) -> None:
        """Decide from the ranks' local gradients whether the fault is in forward and backward or in the reduction.

        `local_gradients` are by microbatch, before the reduction; `gradients` are reduced, by copy of the model.
        `replicas` is the number of replicas, if it is not the number of copies of the model.
        """
        names, first_difference = self.unexplained, self._rung_result.first_difference
        parameters = dict(self._reference.model.named_parameters())
        reduced = (
            flatten_gradients({name: gradients[0].get(name) for name in names}, parameters)
            * self._step.gradient.divisor
        )
        cause, ranks_text = local_gradient_cause(
            self._step, local_gradients, names=names, reduced=reduced, ranks=replicas or len(gradients)
        )
        self._location = ranks_text and f"on {ranks_text}"
        if first_difference is not None:
            share = f"{len(self._diagnosis.unexplained)} of {len(self.expected_gradient)} parameters"
            first_difference["cause"] = f"{cause} ({share})"

    def record_coverage(self, recorder: CoverageRecorder) -> None:
        """Record what the reference's step exercises; its gradient must be finite."""
        recorder.record_gradient(
            self._step.gradient, position=self._position, num_microbatches=len(self._step.microbatches)
        )

    def record_module_outputs(self, microbatches: int) -> ModuleOutputs:
        """Run the reference again, and return the module outputs of the first `microbatches` microbatches."""
        return record_reference_outputs(self._step, model=self._reference.model, microbatches=microbatches)

    def report_module_outputs(self, output_difference: Mapping[str, Any] | None, *, remat: bool) -> None:
        """Record the first module whose output differs as the cause, or a cause outside the modules if none differs."""
        first_difference = self._rung_result.first_difference
        if first_difference is None or output_difference is None:
            return
        floor = self._step.floors.loss
        is_loss_wrong = any(not abs(loss - self._step.gradient.loss) <= floor for loss in self._losses)
        last_name = next((name for name in reversed(list(self.expected_gradient)) if name in self._differing_names), "")
        cause = module_output_cause(
            output_difference,
            rank_names=self._rank_names,
            is_loss_wrong=is_loss_wrong,
            remat=remat,
            last_name=last_name,
        )
        self._location = dropout_location(
            output_difference, rank_names=self._rank_names, is_loss_wrong=is_loss_wrong, remat=remat
        )
        first_difference["cause"] = (
            f"{cause} ({len(self._differing_names)} of {len(self.expected_gradient)} parameters)"
        )

    def report_dropout_rerun(self, gradients: Sequence[Tensors]) -> None:
        """Record random numbers as the cause if, without dropout, the layout's gradients agree with the reference's."""
        expected = self._step.compute_again().total
        differing = [
            name
            for copy_gradients in gradients
            for name in self._diagnosis.unexplained
            if name in expected
            and euclidean_distance(copy_gradients.get(name, torch.zeros_like(expected[name])), expected[name])
            > self._step.floor(name)
        ]
        first_difference = self._rung_result.first_difference
        if not differing and first_difference is not None:
            first_difference["cause"] = (
                "random streams: without dropout the gradients agree, so dropout draws different numbers than in one "
                f"process{self._location and ', ' + self._location} "
                f"({len(self._diagnosis.unexplained)} of {len(self.expected_gradient)} parameters)"
            )

    def compare_norms(self, norms: Sequence[float | None]) -> None:
        """Compare the gradient norms that the ranks measured for clipping."""
        expected_norm = math.hypot(*(euclidean_norm(value) for value in self.expected_gradient.values()))
        norm_over_copies = (
            None if self._rank_names is None else self._rank_names.norm_over_copies(self.expected_gradient)
        )
        cause = norm_cause(norms, expected_norm, norm_over_copies=norm_over_copies)
        if cause is not None and self._reference.config.max_grad_norm is not None:
            self._rung_result.record_difference(
                step=self._position.step_number, parameter="(gradient norm)", cause=cause
            )

    def compare_weights(
        self,
        *,
        weights_before: Tensors,
        weights_after: Tensors,
        location: str = "",
        rank_names: RankNames | None = None,
        copy: int = 0,
    ) -> None:
        """Compare the weights of one copy of the model, after the layout and the reference applied the same gradient.

        `copy` is the index of the copy; `location` names its rank in a message.
        """
        expected = {name: p.detach() for name, p in self._reference.model.named_parameters()}
        ratios: dict[str, float] = {}
        for name, weight in weights_after.items():
            distance, movement = (
                euclidean_distance(weight, expected[name]),
                euclidean_distance(expected[name], weights_before[name]),
            )
            units = _UPDATE_EPS_HALF if weight.dtype.itemsize < 4 else _UPDATE_EPS
            floor = units * machine_epsilon(weight) * (euclidean_norm(expected[name]) + movement)
            verdict = judge_distance(distance, floor)
            self._rung_result.record(verdict, difference=distance, floor=floor)
            if verdict == DIFFERENT:
                ratios[name] = distance / max(movement, 1e-300)
        self._rung_result.count_compared("weights", len(weights_after))
        if ratios:
            name = max(ratios, key=lambda key: ratios[key])
            tensors = {"before": weights_before[name], "actual": weights_after[name], "expected": expected[name]}
            values = {key: to_double(value).reshape(-1).cpu().numpy() for key, value in tensors.items()}
            cause = update_cause(**values, num_differing=len(ratios), num_parameters=len(weights_after))
            if rank_names is not None and not rank_names.has_only_replicas:
                location = describe_weight_ranks(rank_names, name, weights_after[name], expected[name], copy=copy)
            self._rung_result.record_difference(step=self._position.step_number, parameter=name, cause=cause + location)

    def _compare_gradients(self, observed: ObservedStep, *, is_data_correct: bool) -> None:
        self._rung_result.count_compared("gradients", len(self.expected_gradient) * len(observed.gradients))
        if all(_are_equal(copy_gradients, self.expected_gradient) for copy_gradients in observed.gradients):
            return
        names_by_copy = [self._differing_parameters(copy_gradients) for copy_gradients in observed.gradients]
        wrong_copies = [copy for copy, names in enumerate(names_by_copy) if names]
        if not wrong_copies:
            self._compare_presence(observed.gradients)
            return
        names = self._differing_names = names_by_copy[wrong_copies[0]]
        case = self._build_case(observed.gradients, sort_by_severity(names_by_copy))
        placement = None if case is None or self._rung_result.first_difference else placement_cause(case)
        if placement is not None:
            self._rung_result.record_difference(
                step=self._position.step_number, parameter=placement[0], cause=placement[1]
            )
            return
        location = describe_gradient_ranks(case, names=names, wrong_copies=wrong_copies, copies=len(names_by_copy))
        cause = self._diagnosis.explain(
            observed.gradients, names, wrong_copies[0], is_data_correct, observed.num_replicas
        )
        if self._rung_result.first_difference is not None:
            self._diagnosis.unexplained = []  # an earlier difference explains the gradients
        self._rung_result.record_difference(step=self._position.step_number, parameter=names[0], cause=cause + location)

    def _build_case(self, copies: Sequence[Tensors], names: Sequence[str]) -> GradientCase | None:
        """Return the gradients for a diagnosis of the placement; None if all ranks are replicas."""
        if self._rank_names is None or self._rank_names.has_only_replicas:
            return None
        floors = {name: self._step.floor(name) for name in names}
        return GradientCase(
            rank_names=self._rank_names,
            expected=self.expected_gradient,
            copies=copies,
            differing_names=names,
            floors=floors,
        )

    def _compare_presence(self, copies: Sequence[Tensors]) -> None:
        """Report a gradient that is zeros on one side, the layout or one process, and None on the other.

        The updates then differ, because weight decay and momentum act on zeros but not on None.
        """
        for copy, gradients in enumerate(copies):
            for name in sorted(set(gradients) ^ set(self.expected_gradient)):
                layout_text, reference_text = ("zeros", "none") if name in gradients else ("none", "zeros")
                location = describe_copy(name, copy, rank_names=self._rank_names)
                cause = (
                    f"its gradient is {layout_text} on {location} but {reference_text} in one process: the optimizer "
                    "will differ"
                )
                self._rung_result.record_difference(step=self._position.step_number, parameter=name, cause=cause)
                return

    def _differing_parameters(self, gradients: Tensors) -> list[str]:
        """Record a verdict on each gradient, and return the parameters whose gradient is different, worst first."""
        ratios = {}
        for name in sorted({*gradients, *self.expected_gradient}):
            if name not in self.expected_gradient or name not in gradients:
                present = gradients.get(name, self.expected_gradient.get(name))
                assert present is not None
                distance = euclidean_norm(present)
                if distance == 0.0:
                    continue
            else:
                distance = euclidean_distance(gradients[name], self.expected_gradient[name])
            floor = self._step.floor(name) if distance else 0.0
            verdict = judge_distance(distance, floor)
            self._rung_result.record(verdict, difference=distance, floor=floor)
            if verdict == DIFFERENT:
                ratios[name] = distance / max(floor, 1e-300)
        return sorted(ratios, key=lambda key: -ratios[key])

    def _compare_losses(self, losses: Sequence[float]) -> None:
        for rank, loss in enumerate(losses):
            expected = self._step.gradient.loss
            # both overflow, whether to inf or NaN
            both_nonfinite = not math.isfinite(loss) and not math.isfinite(expected)
            distance = 0.0 if loss == expected or both_nonfinite else abs(loss - expected)
            floor = self._step.floors.loss if distance else 0.0
            if judge_distance(distance, floor) == DIFFERENT:
                ratio = loss / self._step.gradient.loss if self._step.gradient.loss else float("inf")
                cause = (
                    f"the reported loss is {ratio:.4g} times the one-process loss on rank {rank}: "
                    "not summed over all ranks"
                )
                self._rung_result.record_difference(step=self._position.step_number, parameter="(loss)", cause=cause)
                return

    def _compare_buffers(self, copies: Sequence[Tensors], names: Collection[str]) -> None:
        expected = {name: b.detach() for name, b in self._reference.model.named_buffers() if name in names}
        for name, target in expected.items():
            distances = [euclidean_distance(buffers[name], target) for buffers in copies]
            floor = self._step.floors.buffers.get(name, 0.0) if any(distances) else 0.0
            self._rung_result.count_compared("buffers", len(distances))
            for value in distances:
                self._rung_result.record(judge_distance(value, floor), difference=value, floor=floor)
            if any(judge_distance(value, floor) == DIFFERENT for value in distances):
                self._rung_result.record_difference(
                    step=self._position.step_number, parameter=name, cause=self._diagnosis.buffer_cause(name, copies)
                )


def _are_equal(gradients: Tensors, expected: Tensors) -> bool:
    return set(gradients) == set(expected) and all(torch.equal(gradients[name], expected[name]) for name in expected)
