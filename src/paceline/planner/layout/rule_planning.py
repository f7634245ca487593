"""Define the planning rules of an update rule, for the planner and the commands. They do not import torch."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar

from paceline.config.layout import Layout
from paceline.config.update_rule import UpdateRule
from paceline.errors import PacelineError
from paceline.planner.layout.mesh import Mesh

REASON_AGAINST_TOKEN_LIMIT = (
    "the tokens of a step are counted some steps later, but a save counts them immediately, so the step at which the "
    "run ends would depend on when it saves"
)


class RulePlanning:
    """The layouts, batches and settings an update rule supports. The defaults are those of the synchronous rule."""

    refused_settings: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """The reason for each setting that the rule does not support; `update_rule_checks` lists the keys."""
    flushes_pipeline: ClassVar[bool] = True
    """True if a pipeline is empty after each batch, so that its schedule has a bubble."""

    def num_workers(self, update: UpdateRule, *, ranks: int, problems: list[PacelineError]) -> int:
        """Return the number of ranks that compute gradients; if there would be none, add an error to `problems`."""
        return ranks

    def order_ranks(self, mesh: Mesh) -> Mesh:
        """Return the mesh with its ranks in the order that the rule needs."""
        return mesh

    def refuse_layout(self, update: UpdateRule, layout: Layout, mesh: Mesh) -> Iterable[PacelineError]:
        """Return an error for each feature of the layout that the rule does not support."""
        return ()

    def refuse_batch(self, update: UpdateRule, mesh: Mesh, *, num_micro: int) -> Iterable[PacelineError]:
        """Return an error if the batch has too few microbatches (`num_micro`) for the rule."""
        return ()

    def refuse_launcher(self, update: UpdateRule, *, launcher: str) -> Iterable[PacelineError]:
        """Return the errors of a run whose ranks are started by another launcher, such as torchrun or Slurm."""
        return ()

    def refuse_nodes(self, update: UpdateRule, *, num_nodes: int, num_ranks: int) -> Iterable[PacelineError]:
        """Return the errors of a run on several nodes, which Paceline starts itself."""
        return ()

    def notes(self, update: UpdateRule, mesh: Mesh, *, num_micro: int) -> Iterable[str]:
        """Return the lines about the rule that a run prints when it starts."""
        return ()

    def length_notes(self, update: UpdateRule, *, total_steps: int | None) -> Iterable[str]:
        """Return warnings about the length of a run; `total_steps` is None if the data decides it."""
        return ()

    def shorten_for_check(self, update: UpdateRule, *, steps: int) -> tuple[UpdateRule, int]:
        """Return a rule and a number of steps, at least `steps`, for a short check of all that the rule does."""
        return update, steps
