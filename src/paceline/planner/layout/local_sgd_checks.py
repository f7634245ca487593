"""Plan local SGD: when sites synchronize, which parameters they send, and which layouts and settings it supports."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from typing_extensions import override

from paceline.config.layout import Layout, LayoutKind
from paceline.config.update_rule import UpdateRule
from paceline.console.formatting import plural
from paceline.errors import LayoutError, PacelineError, UsageError
from paceline.planner.layout.mesh import Mesh
from paceline.planner.layout.rule_planning import REASON_AGAINST_TOKEN_LIMIT, RulePlanning


def assign_fragments(sizes: Mapping[str, int], *, fragments: int) -> dict[str, int]:
    """Return the number of the fragment of each parameter, from the parameters' element counts (`sizes`).

    A fragment has consecutive parameters. All fragments have about the same number of elements.
    """
    total, num_before = max(sum(sizes.values()), 1), 0
    fragments_by_name = {}
    for name, size in sizes.items():
        fragments_by_name[name] = (2 * num_before + size) * fragments // (2 * total)
        num_before += size
    return fragments_by_name


def fragment_to_send(step: int, *, update: UpdateRule) -> int | None:
    """Return the fragment to send after `step` updates, or None. Each fragment is sent once in `every` updates."""
    position = step % update.every
    return next((f for f in range(update.fragments) if f * update.every // update.fragments == position), None)


def _two_site_options(mesh: Mesh) -> str:
    """Return the options for two sites, each with the given mesh."""
    if mesh.ranks == 1:
        return "--ranks 2"
    zero = f",zero={mesh.zero}" if mesh.zero in (1, 2) else ""
    return f"--layout dp_replicate=2,{mesh}{zero} --ranks {2 * mesh.ranks}"


class LocalSgdPlanning(RulePlanning):
    """The planning rules of `--update local` and `--update diloco`."""

    refused_settings = MappingProxyType(
        {
            "exact": "one process takes different steps than sites do",
            "train.tokens": REASON_AGAINST_TOKEN_LIMIT,
            "log.statistics": "each site has gradients of its own",
            "sync_bn": "it synchronises statistics in the forward, but sites do not wait for each other",
        }
    )

    @override
    def order_ranks(self, mesh: Mesh) -> Mesh:
        """Return the mesh with one site for each coordinate of `dp_replicate`; the ranks of a site are neighbours."""
        return replace(mesh, sites=mesh.dp_replicate)

    @override
    def refuse_layout(self, update: UpdateRule, layout: Layout, mesh: Mesh) -> Iterator[PacelineError]:
        """Yield the errors of local SGD: too few sites, experts across sites, impossible `fragments` or `delay`."""
        if layout.kind is LayoutKind.THREADS:
            yield LayoutError(
                f"--update {update.kind} needs processes, not {layout}.",
                cause="its purpose is fewer messages between machines",
                hint=f"--layout ddp --update {update}",
            )
            return
        if mesh.dp_replicate == 1:
            yield LayoutError(
                f"--update {update.kind} needs several sites, but layout {layout} has one.",
                cause="sites are the replicas of dp_replicate",
                hint=f"{_two_site_options(mesh)} --update {update}",
            )
        if mesh.ep > 1 and mesh.dp_shard % mesh.ep:
            yield LayoutError(
                f"ep={mesh.ep} would spread experts over sites, which train independently.",
                cause=f"a site has {plural(mesh.dp_shard, 'replica')} of its own (dp_shard)",
                hint=f"dp_shard={mesh.ep} with ep={mesh.ep}, or --update sync",
            )
        for is_wrong, description, hint in (
            (update.fragments > update.every, f"{update.fragments} fragments", f"fragments={update.every}"),
            (update.delay >= update.every, f"a delay of {plural(update.delay, 'update')}", f"delay={update.every - 1}"),
        ):
            if is_wrong:
                yield LayoutError(
                    f"--update {update}: {description} in a round of {plural(update.every, 'update')}.",
                    cause="each fragment is sent once per round, and applied before it is sent again",
                    hint=f"--update {update.kind},every={update.every},{hint}",
                )

    @override
    def refuse_batch(self, update: UpdateRule, mesh: Mesh, *, num_micro: int) -> Iterator[PacelineError]:
        """Yield an error if a site would get no microbatch of a full batch."""
        needed = (mesh.dp_replicate - 1) * mesh.dp_shard + 1
        if num_micro < needed:
            yield UsageError(
                f"{plural(num_micro, 'microbatch')} a batch for {plural(mesh.dp_replicate, 'site')}: "
                "one site would never train.",
                cause="microbatches are assigned to replicas in turn",
                hint=f"a smaller --train.micro_batch_size: at least {plural(needed, 'microbatch')} a batch",
            )

    @override
    def notes(self, update: UpdateRule, mesh: Mesh, *, num_micro: int) -> Iterator[str]:
        """Yield the line that describes the rule."""
        ranks = mesh.ranks // mesh.dp_replicate
        sites = f"{plural(mesh.dp_replicate, 'site')} of {plural(ranks, 'rank')}"
        averaging = f"an outer step along their mean change (lr {update.lr:g}, momentum {update.momentum:g})"
        averaging = "their mean" if update.lr == 1.0 and not update.momentum else averaging
        fragments_text = f", in {update.fragments} fragments" if update.fragments > 1 else ""
        delay = (
            f", applied {plural(update.delay, 'update')} later, mixed with {update.mix:g} of the site's own weights"
            if update.delay
            else ""
        )
        yield (
            f"update: {update.kind}, {sites} synchronise every {plural(update.every, 'update')}: "
            f"{averaging}{fragments_text}{delay}"
        )

    @override
    def length_notes(self, update: UpdateRule, *, total_steps: int | None) -> Iterator[str]:
        """Yield a warning if the run ends before its sites synchronize once."""
        if total_steps is not None and total_steps < update.every:
            shorter_rule = replace(update, every=max(update.fragments, update.delay + 1, total_steps // 10))
            yield (
                f"warning: the run ends after {plural(total_steps, 'update')}, before its sites have synchronised: "
                f"they do so every {plural(update.every, 'update')}; --update {shorter_rule}"
            )

    @override
    def shorten_for_check(self, update: UpdateRule, *, steps: int) -> tuple[UpdateRule, int]:
        """Return the rule with its shortest interval, and a number of steps that covers at least two intervals."""
        update = replace(update, every=min(update.every, max(update.fragments, update.delay + 1, 2)))
        return update, max(steps, 2 * update.every + 1)
