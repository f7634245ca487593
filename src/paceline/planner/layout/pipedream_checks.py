"""Plan pipelines without flushes (PipeDream): which layouts and settings they support, and their weight versions."""

from collections.abc import Iterator
from types import MappingProxyType

from typing_extensions import override

from paceline.config.layout import Layout
from paceline.config.update_rule import UpdateKind, UpdateRule
from paceline.console.formatting import plural
from paceline.errors import LayoutError, PacelineError
from paceline.planner.layout.mesh import Mesh
from paceline.planner.layout.rule_planning import REASON_AGAINST_TOKEN_LIMIT, RulePlanning
from paceline.schedule.weight_version_rules import Rule, VersionRule, build_continuous_program, weight_versions_used


def build_version_rule(update: UpdateRule, mesh: Mesh) -> VersionRule:
    """Return the rule by which each stage chooses the weight version for a microbatch."""
    rule = Rule.DOUBLE if update.kind is UpdateKind.DOUBLE else Rule.ENTRY if update.vertical else Rule.NEWEST
    return VersionRule(stages=mesh.pp, rule=rule)


class PipeDreamPlanning(RulePlanning):
    """The planning rules of `--update pipedream` and `--update 2bw`."""

    refused_settings = MappingProxyType(
        {
            "exact": "only an update that waits for each batch can match one process bit for bit",
            "train.tokens": REASON_AGAINST_TOKEN_LIMIT,
            "log.statistics": "the stages are at different updates when a step is logged",
            "skip": "a stage cannot skip a step that other stages have already taken",
            "sync_bn": "statistics of several weight versions would mix",
            "compile": "a compiled block keeps one weight version",
        }
    )
    flushes_pipeline = False

    @override
    def refuse_layout(self, update: UpdateRule, layout: Layout, mesh: Mesh) -> list[PacelineError]:
        """Return an error for each feature of the layout that stages with several weight versions do not support."""
        errors: list[PacelineError] = []
        if mesh.pp == 1:
            errors.append(
                LayoutError(
                    f"--update {update} needs a pipeline, but layout {layout} has none.",
                    cause="it lets pipeline stages continue without waiting for each other",
                    hint=f"--layout pp --ranks {max(2, mesh.ranks)} --update {update}",
                )
            )
        other_axes = [axis for axis in mesh.split_axes if axis not in ("pp", "dp_replicate")]
        if other_axes:
            errors.append(
                LayoutError(
                    f"--update {update} needs pp and dp_replicate only, not {', '.join(other_axes)}.",
                    cause="each stage keeps several versions of whole weights",
                    hint=f"--layout pp={max(2, mesh.pp)},dp_replicate=N --update {update}, or --update sync",
                )
            )
        if mesh.pp > 1 and layout.schedule != "1f1b":
            errors.append(
                LayoutError(
                    f"--update {update} has its own schedule: 1F1B that continues from batch to batch.",
                    cause=f"schedule={layout.schedule} flushes the pipeline after each batch",
                    hint=f"--layout pp={mesh.pp} --update {update}",
                )
            )
        return errors

    @override
    def notes(self, update: UpdateRule, mesh: Mesh, *, num_micro: int) -> Iterator[str]:
        """Yield the line on weight versions and staleness by stage, counted in the program of a few batches."""
        version_rule = build_version_rule(update, mesh)
        micro_per_replica = -(-num_micro // mesh.replicas)
        sizes = [micro_per_replica] * (2 * mesh.pp + 4)
        usage = weight_versions_used(build_continuous_program(version_rule, sizes=sizes), version_rule)
        versions = ", ".join(str(stage_use.num_versions) for stage_use in usage)
        staleness = ", ".join(str(max(stage_use.staleness)) for stage_use in usage)
        yield (
            f"update: {update}, never flushed; {plural(micro_per_replica, 'microbatch')} per update; "
            f"weight versions by stage: {versions}; largest staleness by stage, in updates: {staleness}"
        )
