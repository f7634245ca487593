"""Define the planning rules of an update rule: its checks and notes, which work without torch."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar

from paceline.config.layout import Layout
from paceline.config.update_rule import UpdateRule
from paceline.errors import PacelineError
from paceline.planner.layout.mesh import Mesh


class RulePlanning:
    """The planning rules of one update rule. This base class has the rules for synchronous SGD.

    `refused_settings` has the reason for each setting that the rule does not support; `update_rule_checks` lists the
    keys. `flushes_pipeline` is True if a pipeline is empty after each batch, so that
    each batch has a bubble.
    """

    refused_settings: ClassVar[Mapping[str, str]] = MappingProxyType({})
    flushes_pipeline: ClassVar[bool] = True

    def num_workers(self, update: UpdateRule, *, ranks: int, problems: list[PacelineError]) -> int:
        """Return the number of ranks that compute gradients; add an error to `problems` if there are none."""
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
        """Return a rule and a number of steps for a short check that covers the behavior of the rule."""
        return update, steps
