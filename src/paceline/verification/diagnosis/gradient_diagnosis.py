"""Find the cause of a wrong gradient: compute the reference's step again by microbatch, loss term and random seed."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.batchnorm.norm_tape import norms_with_statistics
from paceline.verification.diagnosis.gradient_cause import explain_gradient, unexplained_gradient
from paceline.verification.diagnosis.gradient_evidence import GradientEvidence
from paceline.verification.diagnosis.rank_names import RankNames
from paceline.verification.diagnosis.update_cause import buffer_cause
from paceline.verification.reference.dropout_isolation import has_dropout
from paceline.verification.reference.reference import ReferenceGradient
from paceline.verification.reference.reference_step import ReferenceStep, Tensors
from paceline.verification.tensor_distance import euclidean_distance, to_double

_MAX_PARAMETERS = 24  # only the worst wrong parameters are examined
_MAX_ELEMENTS = 1 << 16  # of a parameter with more elements, between this number and twice as many are examined
_HIDDEN_STATE = (
    "the job: one process, from the same weights, buffers and samples, has a different gradient the "
    "second time; the model "
    "keeps state that is not a buffer (its own random generator, a counter, a cache), so no two runs are the same"
)
_ORDER_DEPENDENT = (
    "the job: microbatches affect each other (a forward that writes a buffer and reads it), so "
    "their order matters, and "
    "ranks that work at the same time can't reproduce one process's order"
)


class GradientDiagnosis:
    """The search for the cause of wrong gradients or buffers in one step.

    `unexplained`: the parameters with a wrong gradient, worst first, if `explain` found no cause.
    """

    def __init__(self, reference_step: ReferenceStep, *, last_gradient: Tensors, rank_names: RankNames | None) -> None:
        self._step = reference_step
        self._reference = reference_step.reference
        self._last_gradient = last_gradient
        self._rank_names = rank_names
        self.unexplained: list[str] = []

    def explain(
        self, copies: Sequence[Tensors], names: Sequence[str], copy: int, is_data_correct: bool, replicas: int
    ) -> str:
        """Return the likely cause of wrong gradients in one copy of the model.

        `copies` are the gradients of every copy, `copy` the index of this copy, and `names` its wrong parameters, worst
        first. `replicas` is the number of replicas.
        """
        worst_names = list(names[:_MAX_PARAMETERS])
        detailed = self._step.compute_again(keep_contributions=worst_names)
        evidence = self._build_evidence(copies, worst_names, copy, detailed)
        ranks = replicas if self._reference.config.merged_microbatches == 1 else 1
        parameter_counts = {"num_parameters": len(self._step.gradient.total), "num_differing": len(names)}
        facts: dict[str, Any] = {**parameter_counts, "ranks": ranks, "is_data_correct": is_data_correct}
        facts["samples"] = sum(map(len, detailed.samples))
        if self._rank_names is not None and not self._rank_names.has_only_replicas:
            facts |= {
                "axes": self._rank_names.weight_axes(),
                "replica_names": [self._rank_names.replica_name(k) for k in range(replicas)],
            }
        explanation = explain_gradient(evidence, counts=detailed.counts, **facts)
        for term in detailed.term_counts if explanation is None and len(detailed.term_counts) > 1 else ():
            term_gradient = self._step.compute_again(keep_contributions=worst_names, term=term)
            term_evidence = self._build_evidence(copies, worst_names, copy, term_gradient, all_terms=detailed)
            explanation = explain_gradient(term_evidence, counts=term_gradient.term_counts[term], **facts)
            if explanation is not None:
                return f"loss term {term!r}: {explanation}"
        if explanation is None and has_dropout(self._reference.model):
            explanation = self._explain_by_dropout_keys(copies[copy], worst_names, ranks)
        if explanation is None:
            self.unexplained = list(names)
            if not self._step.floors.is_repeatable:
                self.unexplained = []
                return _HIDDEN_STATE
            if not self._step.floors.is_order_independent:
                self.unexplained = []
                return _ORDER_DEPENDENT
        return explanation or unexplained_gradient(evidence, **parameter_counts, is_data_correct=is_data_correct)

    def _explain_by_dropout_keys(self, gradients: Tensors, names: Sequence[str], ranks: int) -> str | None:
        """Try common mistakes in dropout's keys; return the first that gives the layout's gradients, or None."""
        key_mistakes: dict[str, Callable[[int], int]] = {
            "by its number on its rank, so that all ranks draw equal numbers": lambda j: j // ranks,
            "as rank 0's microbatch at that time, so that all ranks draw equal numbers": lambda j: j // ranks * ranks,
            "by its rank, so that all microbatches of a rank draw equal numbers": lambda j: j % ranks,
            "once, so that all microbatches draw equal numbers": lambda j: 0,
        }
        for description, random_microbatch in key_mistakes.items():
            gradient = self._step.compute_again(random_microbatch=random_microbatch).total
            if all(
                name in gradient
                and euclidean_distance(gradients.get(name, gradient[name] * 0), gradient[name])
                <= self._step.floor(name)
                for name in names
            ):
                return f"random streams: each microbatch's dropout is keyed {description}"
        return None

    def _build_evidence(
        self,
        copies: Sequence[Tensors],
        names: Sequence[str],
        copy: int,
        detailed: ReferenceGradient,
        all_terms: ReferenceGradient | None = None,
    ) -> list[GradientEvidence]:
        """Return the evidence about each of the gradients `names`.

        `detailed` has the contributions of the microbatches. If it has one loss term only, `all_terms` has all of
        them, and the other terms are subtracted from the layout's gradients.
        """
        evidence = []
        weights = self._step.start.tensors
        for name in names:
            like = next((tensors[name] for tensors in detailed.contributions if name in tensors), weights[name])
            contributions = torch.stack(
                [sample_elements(part.get(name, torch.zeros_like(like))) for part in detailed.contributions]
            )
            other_terms = torch.zeros_like(contributions[0])
            if all_terms is not None:
                other_terms = sum(
                    (sample_elements(part[name]) for part in all_terms.contributions if name in part), other_terms
                ) - contributions.sum(0)
            observed = [
                sample_elements(gradients.get(name, torch.zeros_like(like))) * detailed.divisor - other_terms
                for gradients in copies
            ]
            added_directions = {
                "it still contains the previous step's gradient: not set to zero": self._last_gradient.get(name)
            }
            added_directions["weight decay was added to the gradient"] = weights[name]
            evidence.append(
                GradientEvidence(
                    name=name,
                    observed=observed[copy].numpy(),
                    contributions=contributions.numpy(),
                    floor=max(self._step.floor(name) * detailed.divisor, 1e-300),
                    by_copy=[other.numpy() for other in observed],
                    added_directions={
                        text: sample_elements(value).numpy()
                        for text, value in added_directions.items()
                        if value is not None
                    },
                )
            )
        return evidence

    def buffer_cause(self, name: str, copies: Sequence[Tensors]) -> str:
        """Return the likely cause of a wrong buffer."""
        path, _, kind = name.rpartition(".")
        momentum = {owner: module.momentum for owner, module in norms_with_statistics(self._reference.model)}.get(path)
        detailed = self._step.compute_again(keep_contributions=[next(iter(self._step.gradient.total))])
        return buffer_cause(
            buffers=[sample_elements(buffers[name]).numpy() for buffers in copies],
            before=sample_elements(self._step.start.tensors[name]).numpy(),
            expected=[sample_elements(buffers[name]).numpy() for buffers in detailed.buffers],
            momentum=momentum if kind in ("running_mean", "running_var") else None,
        )


def sample_elements(tensor: Tensor) -> Tensor:
    """Return the tensor's elements, flat and in double precision; of a large tensor, only every k-th."""
    flat = to_double(tensor).reshape(-1)
    return flat[:: max(1, flat.numel() // _MAX_ELEMENTS)].cpu()
