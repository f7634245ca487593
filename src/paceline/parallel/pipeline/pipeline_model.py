"""A model as pipeline stages: the stages that this rank runs, and their schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import nn

from paceline.comm.process_group import World
from paceline.config.layout import Layout
from paceline.config.settings import PlacementSettings
from paceline.errors import LayoutError
from paceline.parallel.initialization.deferred_fill import DeferredModel
from paceline.parallel.module_access.blocks import NoChain, find_blocks
from paceline.parallel.pipeline.chain.split import StageSplit, plan_stage_split
from paceline.parallel.pipeline.chain.stages import Stages
from paceline.parallel.pipeline.free_memory import absent_parameters, keep_shared_storage
from paceline.parallel.pipeline.graph.cut_points import GraphPlan, plan_graph
from paceline.parallel.pipeline.graph.split import GraphStageSplit
from paceline.parallel.pipeline.graph.stages import GraphStages
from paceline.parallel.pipeline.stagewise_check import compare_stagewise
from paceline.planner.layout.mesh import Mesh
from paceline.planner.layout.pipeline_options import build_pipeline_program, is_schedule_file
from paceline.schedule.lowering import forward_only
from paceline.schedule.program import Program
from paceline.schedule.text_format import read

Programs = Callable[[int], Program]
Seconds = Callable[[Mapping[str, nn.Module]], Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class PipelineModel:
    """The pipeline stages of one rank.

    `program(n)` is the schedule of all ranks for n microbatches, `forward(n)` the schedule without backward.
    `hollow` are the parameters and buffers that only other ranks hold. `splits`: whether a stage's
    backward can be split into input and weight gradients, as zero-bubble schedules require.
    """

    stages: Stages | GraphStages
    split: StageSplit | GraphStageSplit
    world: World
    build_program: Programs
    build_forward_program: Programs
    absent_names: frozenset[str]
    can_split_backward: bool = True

    @property
    def has_loss(self) -> bool:
        """Return whether this rank runs the last stage."""
        return self.split.num_stages - 1 in self.stages.owned_stages

    @property
    def is_graph_split(self) -> bool:
        """Return whether the model is split along an exported graph, not along a chain of blocks."""
        return isinstance(self.stages, GraphStages)

    @property
    def ties(self) -> dict[str, list[int]]:
        """Return the names of the parameters that several ranks hold, with these ranks."""
        owners = self.build_forward_program(1).rank_of_stage
        found = {name: sorted({owners[stage] for stage in stages}) for name, stages in self.split.ties.items()}
        return {name: ranks for name, ranks in found.items() if len(ranks) > 1}


def build_pipeline_model(
    model: nn.Module,
    *,
    layout: Layout,
    mesh: Mesh,
    world: World,
    call: Callable[[], object],
    settings: PlacementSettings,
    report: Callable[[str], None] = lambda line: None,
    can_split_backward: bool = True,
    time_modules: Seconds | None = None,
    deferred_model: DeferredModel | None = None,
) -> PipelineModel:
    """Split a model into stages, in place. `call` runs forward and loss of one microbatch.

    `how` may list blocks and stages. A model without a chain of blocks is split along its exported graph, and
    `say` receives a note. `seconds` measures the modules' times, by which the stages are balanced. `late`
    is set if the parameters are still on the meta device.

    Raises:
        LayoutError: the model can't be split into stages; the message gives the cause.
    """
    program = cache(lambda num_micro: build_pipeline_program(layout, mesh, num_micro=num_micro))
    some = read(layout.schedule) if is_schedule_file(layout.schedule) else program(1)
    own = some.stages_of(world.rank)
    compares = not world.is_simulated  # simulated ranks have no values
    found = _chain(
        model,
        num_stages=some.num_stages,
        call=call,
        how=settings,
        seconds=time_modules,
        late=deferred_model,
        compares=compares,
    )
    stages: Stages | GraphStages
    if isinstance(found, StageSplit):
        _refuse_counted(found, some)
        stages = Stages(model, split=found, owned_stages=own, device=world.device)
        hollow = _hollow(model, cut=found, own=own)
    else:
        _refuse_beside(mesh, found)
        plan = _graph(
            model,
            found,
            num_stages=some.num_stages,
            call=call,
            how=settings,
            seconds=time_modules,
            device=world.device,
            late=deferred_model,
        )
        stages = GraphStages(model, split=plan.split, owned_stages=own, empty_model=plan.empty_model)
        hollow = _hollow_graph(model, cut=plan.split, own=own)
        report(_told(plan.split, found))
        if plan.prints:
            report("note: print() between calls of modules is not part of the exported graph and will not run")
    return PipelineModel(
        stages=stages,
        split=stages.split,
        world=world,
        build_program=program,
        build_forward_program=cache(lambda num_micro: forward_only(rank_of_stage=some.rank_of_stage, micro=num_micro)),
        absent_names=hollow,
        can_split_backward=can_split_backward,
    )


def _chain(
    model: nn.Module,
    *,
    num_stages: int,
    call: Callable[[], object],
    how: PlacementSettings,
    seconds: Seconds | None,
    late: DeferredModel | None,
    compares: bool,
) -> StageSplit | NoChain | None:
    """Split along the chain of blocks; return the error if this fails, or None if the settings require `export`."""
    if how.cut == "export":
        return None
    blocks, bounds = how.blocks or None, how.stages or None
    try:
        chain = {block.name: block.module for block in find_blocks(model, listed_names=blocks)}
        weights = None if seconds is None else seconds(chain)
        plan = partial(
            plan_stage_split, model, num_stages=num_stages, call=call, blocks=blocks, bounds=bounds, weights=weights
        )

        if late is not None:  # `compare_stagewise` would need the memory of the full model
            return late.run_without_values(plan)
        cut = plan()
        compare_stagewise(model, split=cut, call=call, has_values=compares)
        return cut
    except NoChain as error:
        if how.cut == "chain":
            raise LayoutError(error.what, where=error.where, cause=error.cause, hint=error.hint) from error
        return error


def _graph(
    model: nn.Module,
    refused: NoChain | None,
    *,
    num_stages: int,
    call: Callable[[], object],
    how: PlacementSettings,
    seconds: Seconds | None,
    device: torch.device,
    late: DeferredModel | None,
) -> GraphPlan:
    """Split along the exported graph; an error also gives the reason why there is no chain of blocks."""
    blocks, bounds = how.blocks or None, how.stages or None
    try:
        return plan_graph(
            model,
            num_stages=num_stages,
            call=call,
            device=device,
            blocks=blocks,
            bounds=bounds,
            time_modules=seconds,
            deferred_model=late,
        )
    except LayoutError as error:
        if refused is not None:
            error.cause += f" (and as a chain: {refused.what.partition(':')[0]})"
        raise


def _refuse_counted(cut: StageSplit, program: Program) -> None:
    """Raise if the forward counts in Python and a rank has several stages, each of which starts the forward."""
    several = program.num_stages > len(set(program.rank_of_stage))
    if cut.counts and several:
        raise LayoutError(
            f"the forward changes self.{cut.counts}, and a rank with several stages would do it once per stage.",
            cause="a counter in Python, and a schedule with more than one stage on a rank",
            hint="a schedule with one stage per rank: --layout pp,schedule=1f1b; or count in the training loop",
        )


def _refuse_beside(mesh: Mesh, refused: NoChain | None) -> None:
    axis = next((axis for axis in ("cp", "ep") if mesh.size(axis) > 1), None)
    if axis is not None:
        raise LayoutError(
            f"pp with {axis} needs a chain of blocks: {axis} does not see the operations of an exported graph.",
            cause="--place.cut export" if refused is None else refused.what,
            hint=f"--layout pp or --layout {axis} alone",
        )


def _told(cut: GraphStageSplit, refused: NoChain | None) -> str:
    """Return a note on the split along the graph, for the console and the log."""
    why = "requested" if refused is None else refused.what.partition(":")[0]
    borders = ", ".join(f"{border.after} +{border.steps}" if border.steps else border.after for border in cut.borders)
    return f"note: stages are cut along the exported graph ({why}); borders after {borders}"


def _hollow_graph(model: nn.Module, *, cut: GraphStageSplit, own: tuple[int, ...]) -> frozenset[str]:
    """Return the parameters and buffers that only other ranks hold."""
    empty = absent_parameters(model, split=cut, owned_stages=own)
    found = {name for name, parameter in model.named_parameters() if parameter in empty}
    found |= {name for name, buffer in model.named_buffers() if buffer.is_meta}
    return frozenset(found | {name for name, stage in cut.buffers.items() if stage not in own})


def _hollow(model: nn.Module, *, cut: StageSplit, own: tuple[int, ...]) -> frozenset[str]:
    """Return the parameters and buffers that only other ranks hold."""
    empty = absent_parameters(model, split=cut, owned_stages=own)
    found = {name for name, parameter in model.named_parameters() if parameter in empty}
    found |= {name for name, buffer in model.named_buffers() if buffer.is_meta}
    first = {id(p): name for name, p in model.named_parameters()}
    blocks = [model.get_submodule(name) for name in cut.blocks]
    for path, module in keep_shared_storage(model, blocks):
        held = {first[id(p)] for p in module.parameters()}
        if held and not any(cut.runs(held, stage=stage) for stage in own):
            found |= {f"{path}.{name}" for name, _ in module.named_buffers()}
    return frozenset(found)
