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
from paceline.parallel.pipeline.free_memory import absent_parameters, modules_outside_blocks
from paceline.parallel.pipeline.graph.cut_points import GraphPlan, plan_graph
from paceline.parallel.pipeline.graph.split import GraphStageSplit
from paceline.parallel.pipeline.graph.stages import GraphStages
from paceline.parallel.pipeline.stagewise_check import compare_stagewise
from paceline.planner.layout.mesh import Mesh
from paceline.planner.layout.pipeline_options import build_pipeline_program, is_schedule_file
from paceline.schedule.lowering import forward_only
from paceline.schedule.program import Program
from paceline.schedule.text_format import read

ProgramBuilder = Callable[[int], Program]
"""A function that returns the schedule for a number of microbatches."""
ModuleTimer = Callable[[Mapping[str, nn.Module]], Sequence[float]]
"""A function that returns the measured seconds of each module."""


@dataclass(frozen=True, kw_only=True)
class PipelineModel:
    """The pipeline stages of one rank.

    `build_program(n)` returns the schedule of all ranks for n microbatches, `build_forward_program(n)` the schedule
    without backward. `absent_names` are the parameters and buffers that only other ranks hold. `can_split_backward`:
    whether a stage's backward can be split into input and weight gradients, as zero-bubble schedules require.
    """

    stages: Stages | GraphStages
    split: StageSplit | GraphStageSplit
    world: World
    build_program: ProgramBuilder
    build_forward_program: ProgramBuilder
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
        rank_of_stage = self.build_forward_program(1).rank_of_stage
        ranks_by_name = {
            name: sorted({rank_of_stage[stage] for stage in stages}) for name, stages in self.split.ties.items()
        }
        return {name: ranks for name, ranks in ranks_by_name.items() if len(ranks) > 1}


@dataclass(frozen=True, kw_only=True)
class _SplitRequest:
    """The arguments of a split, along a chain of blocks or along a graph."""

    model: nn.Module
    num_stages: int
    call: Callable[[], object]
    settings: PlacementSettings
    time_modules: ModuleTimer | None
    deferred_model: DeferredModel | None


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
    has_sequence_shards: bool = False,
    time_modules: ModuleTimer | None = None,
    deferred_model: DeferredModel | None = None,
) -> PipelineModel:
    """Split a model into stages, in place. `call` runs forward and loss of one microbatch.

    `settings` may list blocks and stages. A model without a chain of blocks is split along its exported graph, and
    `report` receives a note. The stages are balanced by the seconds that `time_modules` returns.
    With `has_sequence_shards`, sequences run in parts. With `deferred_model`, the parameters are on the meta device.

    Raises:
        LayoutError: the model can't be split into stages; the message gives the cause.
    """
    build_program = cache(lambda num_micro: build_pipeline_program(layout, mesh, num_micro=num_micro))
    program = read(layout.schedule) if is_schedule_file(layout.schedule) else build_program(1)
    owned_stages = program.stages_of(world.rank)
    request = _SplitRequest(
        model=model,
        num_stages=program.num_stages,
        call=call,
        settings=settings,
        time_modules=time_modules,
        deferred_model=deferred_model,
    )
    chain_split = _split_chain(request, has_values=not world.is_simulated)
    stages: Stages | GraphStages
    if isinstance(chain_split, StageSplit):
        _refuse_counter(chain_split, program)
        stages = Stages(model, split=chain_split, owned_stages=owned_stages, device=world.device)
        absent_names = _absent_names_of_chain(model, chain_split, owned_stages)
    else:
        _refuse_graph_with_cp_or_ep(mesh, chain_split, has_sequence_shards=has_sequence_shards)
        plan = _plan_graph(request, chain_split, world.device)
        stages = GraphStages(model, split=plan.split, owned_stages=owned_stages, empty_model=plan.empty_model)
        absent_names = _absent_names(model, plan.split, owned_stages)
        absent_names |= {name for name, stage in plan.split.stage_of_buffer.items() if stage not in owned_stages}
        report(_graph_split_note(plan.split, chain_split))
        if plan.has_print_calls:
            report("note: print() between calls of modules is not part of the exported graph and will not run")
    return PipelineModel(
        stages=stages,
        split=stages.split,
        world=world,
        build_program=build_program,
        build_forward_program=cache(
            lambda num_micro: forward_only(rank_of_stage=program.rank_of_stage, micro=num_micro)
        ),
        absent_names=frozenset(absent_names),
        can_split_backward=can_split_backward,
    )


def _split_chain(request: _SplitRequest, *, has_values: bool) -> StageSplit | NoChain | None:
    """Return the split along the chain of blocks, the error if this fails, or None if `cut` is `export`."""
    settings, model = request.settings, request.model
    if settings.cut == "export":
        return None
    names = settings.blocks or None
    try:
        blocks = {block.name: block.module for block in find_blocks(model, listed_names=names)}
        plan = partial(
            plan_stage_split,
            model,
            num_stages=request.num_stages,
            call=request.call,
            blocks=names,
            bounds=settings.stages or None,
            weights=None if request.time_modules is None else request.time_modules(blocks),
        )
        if request.deferred_model is not None:  # `compare_stagewise` would need the memory of the full model
            return request.deferred_model.run_without_values(plan)
        split = plan()
        compare_stagewise(model, split=split, call=request.call, has_values=has_values)
        return split
    except NoChain as error:
        if settings.cut == "chain":
            raise LayoutError(error.what, where=error.where, cause=error.cause, hint=error.hint) from error
        return error


def _plan_graph(request: _SplitRequest, no_chain: NoChain | None, device: torch.device) -> GraphPlan:
    """Plan the split along the exported graph; an error also gives the reason why there is no chain of blocks."""
    try:
        return plan_graph(
            request.model,
            num_stages=request.num_stages,
            call=request.call,
            device=device,
            blocks=request.settings.blocks or None,
            bounds=request.settings.stages or None,
            time_modules=request.time_modules,
            deferred_model=request.deferred_model,
        )
    except LayoutError as error:
        if no_chain is not None:
            error.cause += f" (and as a chain: {no_chain.what.partition(':')[0]})"
        raise


def _refuse_counter(split: StageSplit, program: Program) -> None:
    """Raise if the forward counts in Python and a rank has several stages, which would each count."""
    has_several_stages = program.num_stages > len(set(program.rank_of_stage))
    if split.counter_attribute and has_several_stages:
        raise LayoutError(
            f"the forward changes self.{split.counter_attribute}, and a rank with several stages would do it once per "
            "stage.",
            cause="a counter in Python, and a schedule with more than one stage on a rank",
            hint="a schedule with one stage per rank: --layout pp,schedule=1f1b; or count in the training loop",
        )


def _refuse_graph_with_cp_or_ep(mesh: Mesh, no_chain: NoChain | None, *, has_sequence_shards: bool) -> None:
    used = {"cp": mesh.cp > 1 or has_sequence_shards, "ep": mesh.ep > 1}
    axis = next((axis for axis, is_used in used.items() if is_used), None)
    if axis is not None:
        raise LayoutError(
            f"pp with {axis} needs a chain of blocks. pp exports other models as graphs, and {axis} can't see "
            "a graph's operations.",
            cause="--place.cut export" if no_chain is None else no_chain.what,
            hint=f"--layout pp or --layout {axis} alone",
        )


def _graph_split_note(split: GraphStageSplit, no_chain: NoChain | None) -> str:
    """Return a note on the split along the graph, for the console and the log."""
    reason = "requested" if no_chain is None else no_chain.what.partition(":")[0]
    borders = ", ".join(
        f"{each.preceding_call} +{each.num_graph_steps}".removesuffix(" +0") for each in split.boundaries
    )
    return f"note: stages are cut along the exported graph ({reason}); borders after {borders}"


def _absent_names(model: nn.Module, split: StageSplit | GraphStageSplit, owned_stages: tuple[int, ...]) -> set[str]:
    """Return the parameters that only other ranks hold, and the buffers whose memory is freed."""
    absent = absent_parameters(model, split=split, owned_stages=owned_stages)
    names = {name for name, parameter in model.named_parameters() if parameter in absent}
    return names | {name for name, buffer in model.named_buffers() if buffer.is_meta}


def _absent_names_of_chain(model: nn.Module, split: StageSplit, owned_stages: tuple[int, ...]) -> set[str]:
    """Return the parameters and buffers that only other ranks hold, and the buffers of modules that never run here.

    A module outside the blocks runs only on stages that hold the parameters that it needs. On other stages, a
    `Placeholder` makes an output of the same shape instead, and the module's buffers are not updated.
    """
    names = _absent_names(model, split, owned_stages)
    first_names = {id(p): name for name, p in model.named_parameters()}
    blocks = [model.get_submodule(name) for name in split.blocks]
    for module_name, module in modules_outside_blocks(model, blocks):
        parameters = {first_names[id(p)] for p in module.parameters()}
        if parameters and not any(split.can_run_module(parameters, stage=stage) for stage in owned_stages):
            names |= {f"{module_name}.{name}" for name, _ in module.named_buffers()}
    return names
