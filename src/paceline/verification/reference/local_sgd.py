"""A one-process reference for local SGD: sites that train separately and synchronise at intervals, run in turn.

It is the reference of `--update local` and `diloco`, written naively: full models in dictionaries, the outer step as a
formula. It shares two functions with the package: the one that assigns parameters to fragments, and the one that says
at which steps each fragment is sent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from paceline.config.update_rule import UpdateRule
from paceline.planner.layout.local_sgd_checks import assign_fragments, fragment_to_send
from paceline.verification.reference.loss_terms import nonzero_counts
from paceline.verification.reference.reference import Reference, ReferenceGradient, ReferenceMicrobatch, RunPosition

NamedTensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class SyncRule:
    """The update rule, the number of sites, and the number of replicas in each site."""

    rule: UpdateRule
    sites: int
    replicas_per_site: int

    def microbatches_of_site(self, site: int, num_micro: int) -> list[int]:
        """Return the microbatches of a site. Replicas get microbatches in turn; a site has consecutive replicas."""
        num_replicas = self.sites * self.replicas_per_site
        return [index for index in range(num_micro) if index % num_replicas // self.replicas_per_site == site]


@dataclass(kw_only=True)
class _Site:
    weights: NamedTensors
    optimizers: list[Optimizer]
    lr_schedulers: list[Any]


@dataclass(kw_only=True)
class _OuterState:
    """The state that all sites share.

    `pending` holds outer gradients that are sent and not yet applied, as pairs: the number of the update after which
    they are applied, and the outer gradients by name.
    """

    global_weights: NamedTensors
    momentum: NamedTensors = field(default_factory=dict)
    pending: list[tuple[int, NamedTensors]] = field(default_factory=list)


class LocalSgdReference(Reference):
    """The one-process run of local SGD."""

    compute_counts = staticmethod(nonzero_counts)

    def __init__(self, *, sync_rule: SyncRule, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._sync_rule = sync_rule
        self._num_updates = 0
        self._reset_sites()

    @override
    def with_config(self, **changes: Any) -> "LocalSgdReference":
        """Return a new reference at the start of the run, with these changes to its `ReferenceConfig`."""
        reference = super().with_config(**changes)
        return LocalSgdReference(
            sync_rule=self._sync_rule, job=reference.job, config=reference.config, cast=reference.cast
        )

    @override
    def weights(self) -> NamedTensors:
        """Return every site's weights, and the synchronized weights."""
        names = [name for name, _ in self.model.named_parameters()]
        site_weights = {
            f"{n} of site {s}": site.weights[n].clone() for s, site in enumerate(self._sites) for n in names
        }
        return site_weights | {
            f"{name} (synchronized)": value.clone() for name, value in self._outer.global_weights.items()
        }

    @override
    def compute_gradient(
        self, position: RunPosition, *, microbatches: Sequence[ReferenceMicrobatch] | None = None, **options: Any
    ) -> ReferenceGradient:
        """Return each site's gradient of its own samples. The name of a parameter is `site/FQN`.

        Before the first update, all sites start at the current model.
        """
        all_microbatches = self.read_microbatches(position) if microbatches is None else microbatches
        if not self._num_updates:
            self._reset_sites()
        model_state = self._copy_model()
        total: NamedTensors = {}
        counts, loss, total_count = [0.0] * len(all_microbatches), 0.0, 0.0
        for number, site, indices in self._sites_with_samples(len(all_microbatches)):
            self._load_model(site.weights)
            site_gradient = super().compute_gradient(
                position,
                microbatches=[all_microbatches[i] for i in indices],
                random_microbatch=indices.__getitem__,  # the index in the global batch
                **options,
            )
            site.weights = self._copy_model()
            if any(map(any, site_gradient.term_counts.values())):  # a site without a target makes no update
                total |= {f"{number}/{name}": value for name, value in site_gradient.total.items()}
                loss, total_count = (
                    loss + site_gradient.loss * sum(site_gradient.counts),
                    total_count + sum(site_gradient.counts),
                )
            for index, count in zip(indices, site_gradient.counts, strict=True):
                counts[index] = count
        self._load_model(model_state)
        samples = [micro.samples for micro in all_microbatches]
        return ReferenceGradient(
            total=total, counts=counts, divisor=1.0, loss=loss / max(total_count, 1e-300), samples=samples
        )

    @override
    def update(self, gradient: Mapping[str, Tensor]) -> None:
        """Step each site with its own gradient; then send the due fragment, and apply the due outer gradients."""
        for number, site in enumerate(self._sites):
            site_gradient = {
                name.partition("/")[2]: v for name, v in gradient.items() if name.partition("/")[0] == str(number)
            }
            if not site_gradient:  # a short batch without samples for this site, or no target
                for scheduler in site.lr_schedulers:
                    scheduler.step()
                continue
            self._load_model(site.weights)
            self.optimizers, self.lr_schedulers = site.optimizers, site.lr_schedulers
            super().update(site_gradient)
            site.weights = self._copy_model()
        self._num_updates += 1
        self._synchronize()

    def _reset_sites(self) -> None:
        self._sites = []
        for _ in range(self._sync_rule.sites):
            optimizers, schedulers = self._create_optimizers_and_schedulers()
            self._sites.append(_Site(weights=self._copy_model(), optimizers=optimizers, lr_schedulers=schedulers))
        trainable = {name for name, p in self.model.named_parameters() if p.requires_grad}
        self._outer = _OuterState(
            global_weights={name: value for name, value in self._copy_model().items() if name in trainable}
        )

    def _sites_with_samples(self, num_micro: int) -> Iterator[tuple[int, _Site, list[int]]]:
        for number, site in enumerate(self._sites):
            indices = self._sync_rule.microbatches_of_site(number, num_micro)
            if indices:
                yield number, site, indices

    def _synchronize(self) -> None:
        rule, outer = self._sync_rule.rule, self._outer
        fragment = fragment_to_send(self._num_updates, update=rule)
        if fragment is not None:
            sizes = {name: p.numel() for name, p in self.model.named_parameters()}
            fragment_by_name = assign_fragments(sizes, fragments=rule.fragments)
            names = [name for name in outer.global_weights if fragment_by_name[name] == fragment]
            outer.pending.append(
                (self._num_updates + rule.delay, {n: outer.global_weights[n] - self._site_mean(n) for n in names})
            )
        for due_update, outer_gradients in [entry for entry in outer.pending if entry[0] == self._num_updates]:
            outer.pending.remove((due_update, outer_gradients))
            for name, outer_gradient in outer_gradients.items():
                self._apply_outer_step(name, outer_gradient)
        if fragment == 0:
            for name, buffer in self.model.named_buffers():
                if buffer.is_floating_point():
                    mean = self._site_mean(name)
                    for site in self._sites:
                        site.weights[name] = mean.clone()

    def _apply_outer_step(self, name: str, outer_gradient: Tensor) -> None:
        rule, outer = self._sync_rule.rule, self._outer
        if rule.momentum:
            outer.momentum[name] = (
                rule.momentum * outer.momentum.get(name, torch.zeros_like(outer_gradient)) + outer_gradient
            )
            outer_gradient = outer_gradient + rule.momentum * outer.momentum[name]
        outer.global_weights[name] = outer.global_weights[name] - rule.lr * outer_gradient
        local_share = rule.mix if rule.delay else 0.0
        for site in self._sites:
            site.weights[name] = local_share * site.weights[name] + (1.0 - local_share) * outer.global_weights[name]

    def _site_mean(self, name: str) -> Tensor:
        return torch.stack([site.weights[name] for site in self._sites]).mean(dim=0)

    def _copy_model(self) -> NamedTensors:
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in tensors}

    def _load_model(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
                tensor.copy_(weights[name])
