"""Pipelines without flushes (PipeDream): what they can be combined with, and their weight versions."""

from collections.abc import Iterator
from types import MappingProxyType

from paceline.config.layout import Layout
from paceline.config.update_rule import UpdateKind, UpdateRule
from paceline.console.formatting import plural
from paceline.errors import LayoutError, PacelineError
from paceline.planner.layout.mesh import Mesh
from paceline.planner.layout.rule_planning import RulePlanning
from paceline.schedule.weight_version_rules import Rule, VersionRule, continuous, weight_versions_used


def stash_of(update: UpdateRule, mesh: Mesh) -> VersionRule:
    """Return the rule by which stages choose weight versions."""
    rule = Rule.DOUBLE if update.kind is UpdateKind.DOUBLE else Rule.ENTRY if update.vertical else Rule.NEWEST
    return VersionRule(stages=mesh.pp, rule=rule)


class PipeDreamPlanning(RulePlanning):
    """The answers of `--update pipedream` and `--update 2bw`."""

    refused_settings = MappingProxyType(
        {
            "exact": "only an update that waits for each batch can match one process bit for bit",
            "tokens": "token counts arrive some steps late, so the end would move after each save",
            "statistics": "the stages are at different updates when a step is logged",
            "skip": "other stages have already taken the step",
            "sync_bn": "statistics of several weight versions would mix",
            "compile": "a compiled block keeps one weight version",
        }
    )
    flushes_pipeline = False

    def refuse_layout(self, update: UpdateRule, layout: Layout, mesh: Mesh) -> list[PacelineError]:
        """Return an error for each feature of the layout that stages with several weight versions cannot have."""
        found: list[PacelineError] = []
        if mesh.pp == 1:
            found.append(
                LayoutError(
                    f"--update {update} needs a pipeline, but layout {layout} has none.",
                    cause="it lets pipeline stages continue without waiting for each other",
                    hint=f"--layout pp --ranks {max(2, mesh.ranks)} --update {update}",
                )
            )
        others = [axis for axis in mesh.split if axis not in ("pp", "dp_replicate")]
        if others:
            found.append(
                LayoutError(
                    f"--update {update} needs pp and dp_replicate only, not {', '.join(others)}.",
                    cause="each stage keeps several versions of whole weights",
                    hint=f"--layout pp={max(2, mesh.pp)},dp_replicate=N --update {update}, or --update sync",
                )
            )
        if mesh.pp > 1 and layout.schedule != "1f1b":
            found.append(
                LayoutError(
                    f"--update {update} has its own schedule: 1F1B that continues from batch to batch.",
                    cause=f"schedule={layout.schedule} flushes the pipeline after each batch",
                    hint=f"--layout pp={mesh.pp} --update {update}",
                )
            )
        return found

    def notes(self, update: UpdateRule, mesh: Mesh, *, num_micro: int) -> Iterator[str]:
        """Yield the line on weight versions and staleness by stage, from the program of a few batches."""
        stash = stash_of(update, mesh)
        rounds = -(-num_micro // mesh.replicas)
        sizes = [rounds] * (2 * mesh.pp + 4)
        found = weight_versions_used(continuous(stash, sizes=sizes), stash)
        versions = ", ".join(str(one.alive) for one in found)
        late = ", ".join(str(max(one.staleness)) for one in found)
        yield (
            f"update: {update}, never flushed; {plural(rounds, 'microbatch')} per update; by stage: "
            f"{versions} versions of its weights, at most {late} updates late"
        )
