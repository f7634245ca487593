"""A one-process reference for local SGD: sites that train separately and synchronise at intervals, run in turn.

It is the reference of `--update local` and `diloco`, written naively: whole models in dictionaries, the outer step by
its formula. From the package it uses only the steps at which each fragment is sent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.config.update_rule import UpdateRule
from paceline.planner.layout.local_sgd_checks import fragment_of, sent_after
from paceline.verification.reference.loss_terms import counts_of_part
from paceline.verification.reference.reference import Gradient, Micro, Reference, RunPosition

Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class SyncRule:
    """The update rule, the number of sites, and over how many replicas each site deals its microbatches."""

    rule: UpdateRule
    sites: int
    replicas: int

    def own(self, site: int, num_micro: int) -> list[int]:
        """Return the microbatches of a site, which are dealt to all replicas in turn; a site has adjacent replicas."""
        every = self.sites * self.replicas
        return [index for index in range(num_micro) if index % every // self.replicas == site]


@dataclass(kw_only=True)
class _Site:
    weights: Weights
    optimizers: list[Optimizer]
    schedules: list[Any]


@dataclass(kw_only=True)
class _Outer:
    """The state that all sites agree on; `coming` holds means sent but not yet due: (update, difference by name)."""

    agreed: Weights
    momentum: Weights = field(default_factory=dict)
    coming: list[tuple[int, Weights]] = field(default_factory=list)


class LocalReference(Reference):
    """The one-process run of local SGD."""

    counts_of = staticmethod(counts_of_part)

    def __init__(self, *, meeting: SyncRule, **same: Any) -> None:
        super().__init__(**same)
        self._meeting = meeting
        self._taken = 0
        self._begin()

    def with_spec(self, **changes: Any) -> "LocalReference":
        """Return the same run from its start, with changes to its `ReferenceConfig`."""
        plain = super().with_spec(**changes)
        return LocalReference(meeting=self._meeting, job=plain.job, spec=plain.spec, cast=plain.cast)

    def weights(self) -> Weights:
        """Return every site's weights, and the weights that the sites agreed on."""
        names = [name for name, _ in self.model.named_parameters()]
        own = {f"{n} of site {s}": site.weights[n].clone() for s, site in enumerate(self._sites) for n in names}
        return own | {f"{name} as agreed": value.clone() for name, value in self._outer.agreed.items()}

    def gradient(self, at: RunPosition, *, pieces: Sequence[Micro] | None = None, **how: Any) -> Gradient:
        """Return each site's gradient of its own samples, as `site/FQN`.

        Before the first update, all sites start at the current model.
        """
        given = self.pieces(at) if pieces is None else pieces
        if not self._taken:
            self._begin()
        before = self._now()
        total: Weights = {}
        counts, loss, weight = [0.0] * len(given), 0.0, 0.0
        for number, site, own in self._with_samples(len(given)):
            self._put(site.weights)
            one = super().gradient(at, pieces=[given[i] for i in own], stream=own.__getitem__, **how)
            site.weights = self._now()
            if any(map(any, one.term_counts.values())):  # a site without a target makes no update
                total |= {f"{number}/{name}": value for name, value in one.total.items()}
                loss, weight = loss + one.loss * sum(one.counts), weight + sum(one.counts)
            for index, count in zip(own, one.counts, strict=True):
                counts[index] = count
        self._put(before)
        samples = [micro.samples for micro in given]
        return Gradient(total=total, counts=counts, divisor=1.0, loss=loss / max(weight, 1e-300), samples=samples)

    def update(self, gradient: Mapping[str, Tensor]) -> None:
        """Step each site with its own gradient; then send and apply what is due."""
        for number, site in enumerate(self._sites):
            mine = {name.partition("/")[2]: v for name, v in gradient.items() if name.partition("/")[0] == str(number)}
            if not mine:  # a short batch without samples for this site, or no target
                for schedule in site.schedules:
                    schedule.step()
                continue
            self._put(site.weights)
            self.optimizers, self.schedules = site.optimizers, site.schedules
            super().update(mine)
            site.weights = self._now()
        self._taken += 1
        self._meet()

    def _begin(self) -> None:
        self._sites = []
        for _ in range(self._meeting.sites):
            optimizers, schedules = self._optimizers()
            self._sites.append(_Site(weights=self._now(), optimizers=optimizers, schedules=schedules))
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        self._outer = _Outer(agreed={name: value for name, value in self._now().items() if name in trained})

    def _with_samples(self, num_micro: int) -> Iterator[tuple[int, _Site, list[int]]]:
        for number, site in enumerate(self._sites):
            own = self._meeting.own(number, num_micro)
            if own:
                yield number, site, own

    def _meet(self) -> None:
        rule, outer = self._meeting.rule, self._outer
        sent = sent_after(self._taken, update=rule)
        if sent is not None:
            sizes = {name: p.numel() for name, p in self.model.named_parameters()}
            place = fragment_of(sizes, fragments=rule.fragments)
            names = [name for name in outer.agreed if place[name] == sent]
            outer.coming.append((self._taken + rule.delay, {n: outer.agreed[n] - self._mean(n) for n in names}))
        for due, ways in [one for one in outer.coming if one[0] == self._taken]:
            outer.coming.remove((due, ways))
            for name, way in ways.items():
                self._take(name, way)
        if sent == 0:
            for name, buffer in self.model.named_buffers():
                if buffer.is_floating_point():
                    mean = self._mean(name)
                    for site in self._sites:
                        site.weights[name] = mean.clone()

    def _take(self, name: str, way: Tensor) -> None:
        rule, outer = self._meeting.rule, self._outer
        if rule.momentum:
            outer.momentum[name] = rule.momentum * outer.momentum.get(name, torch.zeros_like(way)) + way
            way = way + rule.momentum * outer.momentum[name]
        outer.agreed[name] = outer.agreed[name] - rule.lr * way
        share = rule.mix if rule.delay else 0.0
        for site in self._sites:
            site.weights[name] = share * site.weights[name] + (1.0 - share) * outer.agreed[name]

    def _mean(self, name: str) -> Tensor:
        return torch.stack([site.weights[name] for site in self._sites]).mean(dim=0)

    def _now(self) -> Weights:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in named}

    def _put(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
                tensor.copy_(weights[name])
