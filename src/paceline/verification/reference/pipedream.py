"""A one-process reference for pipelines without flush, which run each microbatch on weights of several versions.

It is the reference of `--update pipedream` and `2bw`, written naively: it keeps the full model after every update and
assembles, before each microbatch, the weights that the stages would use. From the package it takes the rule that
numbers weight versions, and the stage of each parameter.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from paceline.parallel.pipeline.pipeline_model import PipelineModel
from paceline.schedule.weight_version_rules import BatchBoundaries, VersionRule
from paceline.verification.reference.reference import Reference, ReferenceGradient, ReferenceMicrobatch, RunPosition


@dataclass(frozen=True, kw_only=True)
class PipeDreamRule:
    """The version rule of a pipeline, the stage of each parameter, and the number of replicas.

    Microbatch i of the batch is microbatch i // `replicas` of its replica.
    """

    version_rule: VersionRule
    stage_of: Mapping[str, int]
    replicas: int


class PipeDreamReference(Reference):
    """The one-process run with weight stashing."""

    def __init__(self, *, rule: PipeDreamRule, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._rule = rule
        self._batches = BatchBoundaries()
        self._first_microbatch = 0  # of the current batch, counted per replica from the start of the run
        self._history = [self._copy_weights()]  # the weights by version

    @override
    def with_config(self, **changes: Any) -> "PipeDreamReference":
        """Return a new reference at the start of the run, with these changes to its `ReferenceConfig`."""
        reference = super().with_config(**changes)
        return PipeDreamReference(rule=self._rule, job=reference.job, config=reference.config, cast=reference.cast)

    @override
    def compute_gradient(
        self, position: RunPosition, *, microbatches: Sequence[ReferenceMicrobatch] | None = None, **options: Any
    ) -> ReferenceGradient:
        """Return the gradient, each microbatch on its stashed weights; the newest weights are restored afterwards."""
        step_microbatches = self.read_microbatches(position) if microbatches is None else microbatches
        self._history[-1] = self._copy_weights()
        if self._batches.num_batches < len(self._history):
            self._first_microbatch = self._batches.num_microbatches
            self._batches.add(-(-len(step_microbatches) // self._rule.replicas))
        try:
            return super().compute_gradient(position, microbatches=step_microbatches, **options)
        finally:
            self._load_versions(dict.fromkeys(self._history[-1], len(self._history) - 1))

    @override
    def update(self, gradient: Mapping[str, Tensor]) -> None:
        """Step with this gradient, and store the new weights."""
        super().update(gradient)
        self._history.append(self._copy_weights())

    @override
    def _clip_gradients(self, max_norm: float) -> None:
        """Clip each stage separately: when one stage steps, the others are at different batches."""
        for stage in range(self._rule.version_rule.stages):
            parameters = [p for name, p in self.model.named_parameters() if self._rule.stage_of[name] == stage]
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    @override
    def _seed_microbatch(self, step: int, microbatch: int) -> None:
        """Load the weight version that each stage uses for this microbatch, and seed the generators."""
        replica_microbatch = self._first_microbatch + microbatch // self._rule.replicas
        stages = range(self._rule.version_rule.stages)
        versions = [
            self._rule.version_rule.version(stage=stage, microbatch=replica_microbatch, batches=self._batches)
            for stage in stages
        ]
        self._load_versions({name: versions[self._rule.stage_of[name]] for name in self._history[-1]})
        super()._seed_microbatch(step, microbatch)

    def _copy_weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def _load_versions(self, versions: Mapping[str, int]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self._history[versions[name]][name])


def map_stages(pipeline_model: PipelineModel, names: Iterable[str]) -> dict[str, int]:
    """Return the stage of each parameter; a pipeline without flush has each parameter in one stage."""
    return {name: next(iter(pipeline_model.split.stages_of_parameter(name)), 0) for name in names}
