"""Refuse layouts and settings that Hogwild cannot be combined with."""

from collections.abc import Iterator
from types import MappingProxyType

from typing_extensions import override

from paceline.config.layout import Layout, LayoutKind
from paceline.config.update_rule import UpdateRule
from paceline.errors import LayoutError, PacelineError, UsageError
from paceline.planner.layout.mesh import Mesh
from paceline.planner.layout.rule_planning import REASON_AGAINST_TOKEN_LIMIT, RulePlanning


class HogwildPlanning(RulePlanning):
    """The planning rules of `--update hogwild`."""

    refused_settings = MappingProxyType(
        {
            "device": "workers share the machine's memory, not a GPU's",
            "exact": "the order in which workers write to the model is not reproducible",
            "train.tokens": REASON_AGAINST_TOKEN_LIMIT,
            "log.statistics": "each worker has gradients of its own",
            "fp16": "each worker would have its own loss scale",
            "sync_bn": "it synchronises statistics in the forward, but workers do not wait for each other",
        }
    )

    @override
    def refuse_nodes(self, update: UpdateRule, *, num_nodes: int, num_ranks: int) -> list[PacelineError]:
        """Return an error, because the workers share the memory of one machine."""
        return [
            UsageError(
                "--update hogwild on several nodes: its workers share the memory of one machine.",
                hint="--update ps, whose workers may be on other nodes than the weights; "
                f"or, on one machine, --ranks {num_ranks} --update hogwild",
            )
        ]

    @override
    def refuse_layout(self, update: UpdateRule, layout: Layout, mesh: Mesh) -> list[PacelineError]:
        """Return the errors of a layout in which a Hogwild worker would not have the whole model."""
        errors: list[PacelineError] = []
        other_axes = [axis for axis in mesh.split_axes if axis != "dp_replicate"]
        if other_axes or layout.kind is LayoutKind.THREADS:
            errors.append(
                LayoutError(
                    f"--update hogwild needs ddp, not {layout}.",
                    cause="its workers are processes that write to one shared model without waiting for each other",
                    hint=f"--layout ddp --ranks {mesh.ranks} --update hogwild",
                )
            )
        elif mesh.ranks == 1:
            errors.append(
                LayoutError(
                    "--update hogwild with one rank: no other worker races with it.",
                    cause="a single worker trains as a single process does",
                    hint="--ranks 2, or --update sync",
                )
            )
        return errors

    @override
    def notes(self, update: UpdateRule, mesh: Mesh, *, num_micro: int) -> Iterator[str]:
        """Yield the line that describes the rule."""
        yield f"update: hogwild, {mesh.ranks} workers write to one model without locks, each with its own gradient"
