"""A one-process reference for pipelines without flush, which run each microbatch on weights of several versions.

It is the reference of `--update pipedream` and `2bw`, written naively: it keeps the whole model after every update and
assembles, before each microbatch, what its stages would hold. It shares no training code with the package,
only the rule that numbers weight versions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.pipeline.pipeline_model import PipelineModel
from paceline.schedule.weight_version_rules import Stream, VersionRule
from paceline.verification.reference.reference import Gradient, Micro, Reference, RunPosition


@dataclass(frozen=True, kw_only=True)
class PipeDreamRule:
    """The version rule of a pipeline, the stage of each parameter, and the number of replicas.

    Microbatch i is the i // `replicas`-th of its own replica.
    """

    stash: VersionRule
    stage_of: Mapping[str, int]
    replicas: int


class StashedReference(Reference):
    """The one-process run with weight stashing."""

    def __init__(self, *, way: PipeDreamRule, **same: Any) -> None:
        super().__init__(**same)
        self._way = way
        self._batches = Stream()
        self._begun = 0
        self._history = [self._now()]

    def with_spec(self, **changes: Any) -> "StashedReference":
        """Return the same run from its start, with changes to its `ReferenceConfig`."""
        plain = super().with_spec(**changes)
        return StashedReference(way=self._way, job=plain.job, spec=plain.spec, cast=plain.cast)

    def gradient(self, at: RunPosition, *, pieces: Sequence[Micro] | None = None, **how: Any) -> Gradient:
        """Return the gradient, with stashed weights for each microbatch; afterwards the newest weights are back."""
        given = self.pieces(at) if pieces is None else pieces
        self._history[-1] = self._now()
        if self._batches.num_batches < len(self._history):
            self._begun = self._batches.length
            self._batches.add(-(-len(given) // self._way.replicas))
        try:
            return super().gradient(at, pieces=given, **how)
        finally:
            self._put(dict.fromkeys(self._history[-1], len(self._history) - 1))

    def update(self, gradient: Mapping[str, Tensor]) -> None:
        """Step with this gradient, and keep the new weights."""
        super().update(gradient)
        self._history.append(self._now())

    def _clip(self, most: float) -> None:
        """Clip each stage separately: when one stage steps, the others are at other batches."""
        for stage in range(self._way.stash.stages):
            own = [p for name, p in self.model.named_parameters() if self._way.stage_of[name] == stage]
            torch.nn.utils.clip_grad_norm_(own, most)

    def _draw_from(self, step: int, microbatch: int) -> None:
        k = self._begun + microbatch // self._way.replicas
        stages = range(self._way.stash.stages)
        used = [self._way.stash.version(stage=stage, microbatch=k, stream=self._batches) for stage in stages]
        self._put({name: used[self._way.stage_of[name]] for name in self._history[-1]})
        super()._draw_from(step, microbatch)

    def _now(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def _put(self, versions: Mapping[str, int]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self._history[versions[name]][name])


def stages_of(piped: PipelineModel, names: Iterable[str]) -> dict[str, int]:
    """Return the stage of each parameter; a pipeline without flush has each parameter in one stage."""
    return {name: next(iter(piped.cut.stages_of(name)), 0) for name in names}
