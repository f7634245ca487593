"""The interface of an update rule before torch is imported: what the planner and the commands ask about it."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar

from paceline.config.layout import Layout
from paceline.config.update_rule import UpdateRule
from paceline.errors import PacelineError
from paceline.planner.layout.mesh import Mesh


class RulePlanning:
    """The answers of one update rule. The defaults are those of the synchronous rule.

    `refused_settings` has the reason for each setting that the rule cannot have; `update_rule_checks` has the keys.
    `flushes_pipeline`: a pipeline is empty after each batch, so that its schedule has a bubble to report.
    """

    refused_settings: ClassVar[Mapping[str, str]] = MappingProxyType({})
    flushes_pipeline: ClassVar[bool] = True

    def workers(self, update: UpdateRule, *, ranks: int, problems: list[PacelineError]) -> int:
        """Return the number of ranks that compute gradients; an impossible split is added to `problems`."""
        return ranks

    def arrange(self, mesh: Mesh) -> Mesh:
        """Return the mesh with the order of ranks that the rule needs."""
        return mesh

    def refuse_layout(self, update: UpdateRule, layout: Layout, mesh: Mesh) -> Iterable[PacelineError]:
        """Return an error for each feature of the layout that the rule cannot have."""
        return ()

    def refuse_batch(self, update: UpdateRule, mesh: Mesh, *, num_micro: int) -> Iterable[PacelineError]:
        """Return the errors of a batch that has too few microbatches for the rule."""
        return ()

    def refuse_launcher(self, update: UpdateRule, *, launcher: str) -> Iterable[PacelineError]:
        """Return the errors if another launcher (torchrun, Slurm) starts the ranks."""
        return ()

    def notes(self, update: UpdateRule, mesh: Mesh, *, num_micro: int) -> Iterable[str]:
        """Return the banner lines on the rule."""
        return ()

    def length_notes(self, update: UpdateRule, *, total_steps: int | None) -> Iterable[str]:
        """Return warnings about a run of this length; `total_steps` is None if the data decides it."""
        return ()

    def shorten(self, update: UpdateRule, *, steps: int) -> tuple[UpdateRule, int]:
        """Return the rule and the number of steps with which a short check covers all that the rule does."""
        return update, steps
