"""Reruns of the reference's step on rank 0 to find a cause: in parts, by term, with other random numbers."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.batchnorm.norm_tape import norms_with_statistics
from paceline.verification.diagnosis.gradient_cause import explain_gradient, unexplained_gradient
from paceline.verification.diagnosis.gradient_evidence import Evidence
from paceline.verification.diagnosis.rank_names import RankNames
from paceline.verification.diagnosis.update_cause import buffer_cause
from paceline.verification.noise_floor import ModelSnapshot, NoiseFloors, measure_floors
from paceline.verification.reference.dropout_isolation import has_dropout
from paceline.verification.reference.loss_terms import known_counts
from paceline.verification.reference.reference import Gradient, Reference, RunPosition
from paceline.verification.tensor_distance import euclidean_distance, to_double

_MOST_PARAMETERS = 24
_MOST_ELEMENTS = 1 << 16
Tensors = Mapping[str, Tensor]
_STATE = (
    "the job: one process, from the same weights, buffers and samples, has a different gradient the "
    "second time; the model "
    "keeps state that is not a buffer (its own random generator, a counter, a cache), so no two runs are the same"
)
_ORDER = (
    "the job: microbatches affect each other (a forward that writes a buffer and reads it), so "
    "their order matters, and "
    "ranks that work at the same time can't reproduce one process's order"
)


class ReferenceRerun:
    """A step of the reference that can be run again from the same start."""

    def __init__(
        self, *, reference: Reference, at: RunPosition, last: Tensors, places: RankNames | None = None
    ) -> None:
        self._reference = reference
        self._places = places
        self._at = at
        self._last = last
        self.start = ModelSnapshot(reference.model)
        self.pieces = reference.pieces(at)
        self.gradient: Gradient = reference.gradient(at, pieces=self.pieces)
        self.unexplained: list[str] = []

    @cached_property
    def floors(self) -> NoiseFloors:
        """The noise floors of this step."""
        return measure_floors(self._reference, self.gradient, at=self._at, pieces=self.pieces, start=self.start)

    @cached_property
    def known(self) -> dict[str, float] | None:
        """The global counts, if the job gives them before the forward."""
        return known_counts(self._reference.job, [piece.data for piece in self.pieces])

    @property
    def is_blurred(self) -> bool:
        """True if rounding alone explains any difference found; False if the floors were never measured."""
        return "floors" in vars(self) and self.floors.blurred

    def floor(self, name: str) -> float:
        """Return the noise floor of this parameter's gradient."""
        return self.floors.gradients.get(name, 0.0)

    def cause(
        self, everywhere: Sequence[Tensors], names: Sequence[str], rank: int, is_data_right: bool, replicas: int
    ) -> str:
        kept = list(names[:_MOST_PARAMETERS])
        detailed = self.again(keep=kept)
        evidence = self._evidence(everywhere, kept, rank, detailed)
        ranks = replicas if self._reference.spec.together == 1 else 1
        shape = {"num_parameters": len(self.gradient.total), "num_differing": len(names)}
        given: dict[str, Any] = {**shape, "ranks": ranks, "is_data_right": is_data_right}
        given["samples"] = sum(len(part) for part in detailed.samples)
        if self._places is not None and not self._places.is_replicas:
            given |= {"axes": self._places.axes(), "members": [self._places.replica(k) for k in range(replicas)]}
        found = explain_gradient(evidence, counts=detailed.counts, **given)
        for term in detailed.term_counts if found is None and len(detailed.term_counts) > 1 else ():
            part = self.again(keep=kept, term=term)
            pieces = self._evidence(everywhere, kept, rank, part, rest=detailed)
            found = explain_gradient(pieces, counts=part.term_counts[term], **given)
            if found is not None:
                return f"loss term {term!r}: {found}"
        if found is None and has_dropout(self._reference.model):
            found = self._other_streams(everywhere[rank], kept, ranks)
        if found is None:
            self.unexplained = kept
            if not self.floors.repeats:
                self.unexplained = []
                return _STATE
            if not self.floors.any_order:
                self.unexplained = []
                return _ORDER
        return found or unexplained_gradient(evidence, **shape, is_data_right=is_data_right)

    def _other_streams(self, parts: Tensors, names: Sequence[str], ranks: int) -> str | None:
        """Run the step again as if every microbatch drew another one's dropout, and return the fitting explanation."""
        ways: dict[str, Callable[[int], int]] = {
            "by its round, so that all ranks draw equal numbers": lambda j: j // ranks,
            "as the first of its round, so that all ranks draw equal numbers": lambda j: j // ranks * ranks,
            "by its rank, so that every round draws equal numbers": lambda j: j % ranks,
            "once, so that all microbatches draw equal numbers": lambda j: 0,
        }
        for text, stream in ways.items():
            other = self.again(stream=stream).total
            if all(
                name in other and euclidean_distance(parts.get(name, other[name] * 0), other[name]) <= self.floor(name)
                for name in names
            ):
                return f"random streams: each microbatch's dropout is keyed {text}"
        return None

    def again(
        self, *, keep: Sequence[str] = (), term: str | None = None, stream: Callable[[int], int] = int
    ) -> Gradient:
        """Run the reference's step again from the same start."""
        ended = ModelSnapshot(self._reference.model)
        self.start.put_back()
        found = self._reference.gradient(self._at, pieces=self.pieces, keep=keep, term=term, stream=stream)
        ended.put_back()
        return found

    def _evidence(
        self,
        everywhere: Sequence[Tensors],
        names: Sequence[str],
        rank: int,
        detailed: Gradient,
        rest: Gradient | None = None,
    ) -> list[Evidence]:
        found = []
        weights = self.start.tensors
        for name in names:
            like = next((part[name] for part in detailed.parts if name in part), weights[name])
            rows = torch.stack([linear_view(part.get(name, torch.zeros_like(like))) for part in detailed.parts])
            others = torch.zeros_like(rows[0])
            if rest is not None:
                others = sum((linear_view(part[name]) for part in rest.parts if name in part), others) - rows.sum(0)
            have = [
                linear_view(parts.get(name, torch.zeros_like(like))) * detailed.divisor - others for parts in everywhere
            ]
            also = {"it still contains the previous step's gradient: not set to zero": self._last.get(name)}
            also["weight decay was added to the gradient"] = weights[name]
            found.append(
                Evidence(
                    name=name,
                    found=have[rank].numpy(),
                    contributions=rows.numpy(),
                    floor=max(self.floor(name) * detailed.divisor, 1e-300),
                    everywhere=[other.numpy() for other in have],
                    also={text: linear_view(value).numpy() for text, value in also.items() if value is not None},
                )
            )
        return found

    def buffer_cause(self, name: str, everywhere: Sequence[Tensors]) -> str:
        path, _, kind = name.rpartition(".")
        momentum = {owner: module.momentum for owner, module in norms_with_statistics(self._reference.model)}.get(path)
        detailed = self.again(keep=[next(iter(self.gradient.total))])
        return buffer_cause(
            found=[linear_view(buffers[name]).numpy() for buffers in everywhere],
            before=linear_view(self.start.tensors[name]).numpy(),
            after=[linear_view(buffers[name]).numpy() for buffers in detailed.buffers],
            momentum=momentum if kind in ("running_mean", "running_var") else None,
        )


def linear_view(tensor: Tensor) -> Tensor:
    """Return a linear function of the tensor in double precision: of a large tensor, every k-th element."""
    flat = to_double(tensor).reshape(-1)
    return flat[:: max(1, flat.numel() // _MOST_ELEMENTS)].cpu()
