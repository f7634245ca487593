"""A model as the stages of a pipeline: which this rank runs, and in what order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from torch import nn

from paceline.place.cut import Cut, plan_cut
from paceline.place.hollow import glue, hollow_parameters
from paceline.place.late import Late
from paceline.place.stages import Stages
from paceline.plan.mesh import Mesh
from paceline.plan.pipeline import is_file, program_of
from paceline.schedule.forward import forward_only
from paceline.schedule.program import Program
from paceline.schedule.text import read
from paceline.spec.layout import Layout
from paceline.spec.settings import Place
from paceline.world import World

Programs = Callable[[int], Program]


@dataclass(frozen=True, kw_only=True)
class Piped:
    """One rank's stages. `program` gives what all ranks do for so many microbatches, `forward` without gradients.

    `splits`: whether a stage's backward can be had in halves, as zero-bubble schedules ask for it.
    """

    stages: Stages
    cut: Cut
    world: World
    program: Programs
    forward: Programs
    hollow: frozenset[str]
    splits: bool = True

    @property
    def has_loss(self) -> bool:
        """Whether this rank runs the last stage."""
        return self.cut.num_stages - 1 in self.stages.own

    @property
    def ties(self) -> dict[str, list[int]]:
        """Parameters that several ranks hold, and the ranks."""
        owners = self.forward(1).rank_of_stage
        found = {name: sorted({owners[stage] for stage in stages}) for name, stages in self.cut.ties.items()}
        return {name: ranks for name, ranks in found.items() if len(ranks) > 1}


def cut_model(
    model: nn.Module,
    *,
    asked: Layout,
    mesh: Mesh,
    world: World,
    call: Callable[[], object],
    how: Place,
    splits: bool = True,
    weights: Sequence[float] | None = None,
    late: Late | None = None,
) -> Piped:
    """Cut a whole model in place; `call` runs forward and loss of one microbatch. `how` may list blocks and stages.

    `weights` are what each block costs, where stages are to be of equal cost. `late`: the model has no memory yet.

    Raises:
        LayoutError: what can't be cut, by name.
    """
    program = cache(lambda num_micro: program_of(asked, mesh, num_micro=num_micro))
    some = read(asked.schedule) if is_file(asked.schedule) else program(1)
    blocks, bounds = how.blocks or None, how.stages or None
    plan = partial(
        plan_cut, model, num_stages=some.num_stages, call=call, blocks=blocks, bounds=bounds, weights=weights
    )
    cut = plan() if late is None else late.planned(plan)
    own = some.stages_of(world.rank)
    stages = Stages(model, cut=cut, own=own, device=world.device)
    return Piped(
        stages=stages,
        cut=cut,
        world=world,
        program=program,
        forward=cache(lambda num_micro: forward_only(rank_of_stage=some.rank_of_stage, micro=num_micro)),
        hollow=_hollow(model, cut=cut, own=own),
        splits=splits,
    )


def _hollow(model: nn.Module, *, cut: Cut, own: tuple[int, ...]) -> frozenset[str]:
    """Parameters and buffers that are other ranks' alone."""
    empty = hollow_parameters(model, cut=cut, own=own)
    found = {name for name, parameter in model.named_parameters() if parameter in empty}
    found |= {name for name, buffer in model.named_buffers() if buffer.is_meta}
    first = {id(p): name for name, p in model.named_parameters()}
    blocks = [model.get_submodule(name) for name in cut.blocks]
    for path, module in glue(model, blocks):
        held = {first[id(p)] for p in module.parameters()}
        if held and not any(cut.runs(held, stage=stage) for stage in own):
            found |= {f"{path}.{name}" for name, _ in module.named_buffers()}
    return frozenset(found)
