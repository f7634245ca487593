"""Define what an update rule tells the planner and the commands, which do not import torch."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar

from paceline.config.layout import Layout
from paceline.config.update_rule import UpdateRule
from paceline.errors import PacelineError
from paceline.planner.layout.mesh import Mesh


class RulePlanning:
    """The planning rules of one update rule. The defaults are those of the synchronous rule.

    `refused_settings` has the reason for each setting that the rule does not support; `update_rule_checks` lists the
    keys. If `flushes_pipeline`, a pipeline is empty after each batch, so that its schedule has a bubble.
    """

    refused_settings: ClassVar[Mapping[str, str]] = MappingProxyType({})
    flushes_pipeline: ClassVar[bool] = True

    def num_workers(self, update: UpdateRule, *, ranks: int, problems: list[PacelineError]) -> int:
        """Return the number of ranks that compute gradients; add an impossible split to `problems`."""
        return ranks

    def order_ranks(self, mesh: Mesh) -> Mesh:
        """Return the mesh with the order of ranks that the rule needs."""
        return mesh

    def refuse_layout(self, update: UpdateRule, layout: Layout, mesh: Mesh) -> Iterable[PacelineError]:
        """Return an error for each feature of the layout that the rule does not support."""
        return ()

    def refuse_batch(self, update: UpdateRule, mesh: Mesh, *, num_micro: int) -> Iterable[PacelineError]:
        """Return the errors of a batch that has too few microbatches for the rule."""
        return ()

    def refuse_launcher(self, update: UpdateRule, *, launcher: str) -> Iterable[PacelineError]:
        """Return the errors of a run whose ranks another launcher (torchrun, Slurm) starts."""
        return ()

    def notes(self, update: UpdateRule, mesh: Mesh, *, num_micro: int) -> Iterable[str]:
        """Return the lines about the rule that a run prints when it starts."""
        return ()

    def length_notes(self, update: UpdateRule, *, total_steps: int | None) -> Iterable[str]:
        """Return warnings about the length of a run; `total_steps` is None if the data decides it."""
        return ()

    def shorten_for_check(self, update: UpdateRule, *, steps: int) -> tuple[UpdateRule, int]:
        """Return the rule and the number of steps with which a short check covers everything that the rule does."""
        return update, steps
