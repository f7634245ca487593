"""One process that does what a pipeline without flush does: each microbatch on weights of several times.

The oracle of `--update pipedream` and `2bw`, as naive as can be: it keeps the whole model after every update and puts
together, before each microbatch, what its stages would hold. Of the package it takes the rule alone, as numbers.
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
    """A pipeline's rule, the stage of each parameter, and how many replicas there are: microbatch i is the
    i // `replicas`-th of its own."""

    stash: VersionRule
    stage_of: Mapping[str, int]
    replicas: int


class StashedReference(Reference):
    """The one-process run of that rule."""

    def __init__(self, *, way: PipeDreamRule, **same: Any) -> None:
        super().__init__(**same)
        self._way = way
        self._batches = Stream()
        self._begun = 0
        self._history = [self._now()]

    def with_spec(self, **changes: Any) -> "StashedReference":
        """The same from its start, with something else in its `ReferenceConfig`."""
        plain = super().with_spec(**changes)
        return StashedReference(way=self._way, job=plain.job, spec=plain.spec, cast=plain.cast)

    def gradient(self, at: RunPosition, *, pieces: Sequence[Micro] | None = None, **how: Any) -> Gradient:
        """As the plain one, with other weights for each microbatch; the newest are back when it is done."""
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
        """Step with this gradient, and keep what came of it."""
        super().update(gradient)
        self._history.append(self._now())

    def _clip(self, most: float) -> None:
        """Each stage its own: when it takes its step, the others are at other batches."""
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
    """Each parameter's stage; a pipeline without flush has each in one."""
    return {name: next(iter(piped.cut.stages_of(name)), 0) for name in names}
