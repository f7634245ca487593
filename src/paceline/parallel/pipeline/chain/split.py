"""The split of a model into stages, derived from one traced forward: what each stage holds, receives and sends.

Each stage runs the model's own forward up to its last block. The block before its first block returns the received
output; other modules that the stage does not hold return placeholders. So the stage's blocks and the code between them
may use only the received output, the batch, parameters that the stage holds, and skip values. A skip value is sent from
an earlier stage and passed to a block as an argument, for example the output of an encoder.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from paceline.errors import LayoutError
from paceline.parallel.module_access.blocks import Block, NoChain, find_blocks
from paceline.parallel.pipeline.chain.placeholders import OutputTemplate, output_template
from paceline.parallel.pipeline.chain.requirements import (
    DataDependentBranch,
    StageRequirements,
    find_stage_requirements,
)
from paceline.parallel.pipeline.chain.suggestions import suggest_split
from paceline.parallel.pipeline.chain.trace_module_calls import ForwardTrace, ValueKey, trace_forward
from paceline.parallel.pipeline.stage_bounds import Bounds, balanced_bounds, bounds_from_counts
from paceline.parallel.pipeline.stage_io import OutputClasses, TensorPath
from paceline.parallel.pipeline.stage_parameters import parameters_of_several_stages, stages_of_parameter
from paceline.torch_internals.private_api import NormBase


class Occurrence(NamedTuple):
    """A tensor among the inputs or in the output of a block."""

    block: int
    is_output: bool
    path: TensorPath


Occurrences = Mapping[ValueKey, Sequence[Occurrence]]


@dataclass(frozen=True, kw_only=True)
class SkipValue:
    """A value that is sent between stages in addition to the blocks' outputs.

    `occurrences` are the inputs and outputs of blocks in which the trace found it. `targets` are the block arguments
    that receive it, as (number of the block, path).
    """

    occurrences: tuple[Occurrence, ...]
    targets: tuple[tuple[int, TensorPath], ...]

    def occurrence_in(self, stage: "ChainStage") -> Occurrence | None:
        """Return the first occurrence in the blocks of a stage; None if the stage only passes the value on."""
        return next((each for each in self.occurrences if stage.start <= each.block < stage.stop), None)


@dataclass(frozen=True, kw_only=True)
class ChainStage:
    """A pipeline stage: blocks `start` to `stop`, and the parameters that it holds."""

    index: int
    start: int
    stop: int
    parameters: frozenset[str]
    received_skips: tuple[int, ...]
    """The indices of the skip values that the stage receives."""
    sent_skips: tuple[int, ...]
    """The indices of the skip values that the stage sends."""
    has_rng_state_input: bool
    """Whether the stage also receives the random generator's state, for draws between two blocks."""
    should_clone_inputs: bool
    """Whether received tensors are overwritten in place, which autograd allows only on a clone."""
    buffers: frozenset[str] = frozenset()
    """The buffers that the stage's blocks, or the code around all blocks, use."""


@dataclass(frozen=True, kw_only=True)
class StageSplit:
    """A model split into stages along its blocks; it is determined by the model, and equal on every rank.

    `parameters_used_outside` are the parameters that stages need for code outside their blocks.
    `parameters_read_outside` are those that operations outside the blocks read and that nothing overwrites.
    `output_templates` describe each block's output for its placeholder; None if the output can't be sent.
    `counter_attribute` is an attribute that each forward changes, or "". `enclosed_block` is a block that an autograd
    function calls, as (block, function).
    """

    blocks: tuple[str, ...]
    bounds: Bounds
    stages: tuple[ChainStage, ...]
    skip_values: tuple[SkipValue, ...]
    output_classes: OutputClasses
    output_templates: tuple[OutputTemplate | None, ...]
    parameters_used_outside: frozenset[str]
    parameters_read_outside: frozenset[str]
    counter_attribute: str
    enclosed_block: tuple[str, str] | None = None

    def can_run_module(self, parameters: set[str], *, stage: int) -> bool:
        """Return whether a stage runs a module outside the blocks that has these parameters.

        If not, it runs the module's placeholder.
        """
        held, used = self.stages[stage].parameters, parameters & self.parameters_used_outside
        return (bool(used) and used <= held) or parameters <= held

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.stages)

    @cached_property
    def ties(self) -> Mapping[str, tuple[int, ...]]:
        """Return the parameters that several stages hold, and these stages, over which gradients are summed."""
        return parameters_of_several_stages(self.stages)

    def stages_of_parameter(self, name: str) -> tuple[int, ...]:
        """Return the stages that hold a parameter; `name` is its name in `named_parameters()`."""
        return stages_of_parameter(name, self.stages)

    def as_json(self) -> dict[str, Any]:
        """Return the split as JSON values, for plan.json and for comparing ranks."""
        return {
            "blocks": list(self.blocks),
            "bounds": [list(bound) for bound in self.bounds],
            "carried": [[[each.block, each.is_output] for each in value.occurrences[:1]] for value in self.skip_values],
            "ties": {name: list(stages) for name, stages in self.ties.items()},
        }


def plan_stage_split(
    model: nn.Module,
    *,
    num_stages: int,
    call: Callable[[], Any],
    blocks: Sequence[str] | None = None,
    bounds: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
) -> StageSplit:
    """Plan the split of a model into stages.

    `call` runs the forward (and loss) on one example microbatch; the last stage computes everything that it returns.
    `bounds` lists the number of blocks of each stage. Without it, the stages are balanced by `weights` (seconds of each
    block; default: all equal).

    Raises:
        LayoutError: there is no chain of blocks, there are more stages than blocks, or a needed value can't be sent.
    """
    chain = find_blocks(model, listed_names=blocks)
    if bounds:
        stage_bounds = bounds_from_counts(bounds, num_stages, len(chain))
    else:
        stage_bounds = balanced_bounds(num_stages, chain, weights)
    trace = trace_forward(model, blocks=chain, call=call)
    try:
        return _split_trace(model, trace, stage_bounds)
    except DataDependentBranch as error:
        options = suggest_split(
            model,
            trace=trace,
            num_stages=num_stages,
            try_split=lambda trace, bounds: _split_trace(model, trace, bounds),
            trace_blocks=lambda names: trace_forward(model, blocks=find_blocks(model, listed_names=names), call=call),
        )
        hint = f"{options}; or move it into a block" if options else error.hint
        raise LayoutError(error.what, where=error.where, cause=error.cause, hint=hint) from error


def _split_trace(model: nn.Module, trace: ForwardTrace, bounds: Bounds) -> StageSplit:
    """Return the split of a traced model for these bounds."""
    buffers = _buffers_of_stages(model, trace, bounds)
    requirements = [
        find_stage_requirements(trace, start=start, stop=stop, is_last=stop == len(trace.blocks))
        for start, stop in bounds
    ]
    occurrences = _find_occurrences(trace)
    received = _route_skip_values(trace, requirements, occurrences, bounds)
    keys = list(dict.fromkeys(key for stage_keys in reversed(received) for key in sorted(stage_keys)))
    indices = {key: index for index, key in enumerate(keys)}
    received_skips = [tuple(indices[key] for key in sorted(stage_keys)) for stage_keys in received]
    targets: dict[ValueKey, list[tuple[int, TensorPath]]] = {}
    for stage_requirements in reversed(requirements):
        for key, arguments in stage_requirements.skip_values.items():
            targets.setdefault(key, []).extend(arguments)
    parameters = _parameters_of_stages(model, trace, requirements)
    stages = [
        ChainStage(
            index=index,
            start=start,
            stop=stop,
            parameters=parameters[index],
            received_skips=received_skips[index],
            sent_skips=received_skips[index + 1] if index + 1 < len(bounds) else (),
            has_rng_state_input=bool(start) and _is_draw_next(trace, start),
            should_clone_inputs=bool(start)
            and any(key[0] in trace.overwritten_nodes for key in trace.calls[start - 1].outputs.values()),
            buffers=buffers[index],
        )
        for index, (start, stop) in enumerate(bounds)
    ]
    return StageSplit(
        blocks=tuple(block.name for block in trace.blocks),
        bounds=bounds,
        stages=tuple(stages),
        skip_values=tuple(
            SkipValue(occurrences=tuple(occurrences[key]), targets=tuple(targets.get(key, ()))) for key in keys
        ),
        output_classes=OutputClasses.from_values([block_call.output_value for block_call in trace.calls]),
        output_templates=tuple(
            output_template(block_call.output_value, where=block.name, input_types=block_call.input_types)
            for block, block_call in zip(trace.blocks, trace.calls, strict=True)
        ),
        parameters_used_outside=frozenset(name for each in requirements for name in each.parameters),
        parameters_read_outside=frozenset(_parameters_read_outside(trace)),
        counter_attribute=trace.counter_attribute,
        enclosed_block=trace.enclosed_block,
    )


def _route_skip_values(
    trace: ForwardTrace, requirements: Sequence[StageRequirements], occurrences: Occurrences, bounds: Bounds
) -> list[set[ValueKey]]:
    """Return the skip values that each stage receives: those that it needs, or only passes on to later stages."""
    received: list[set[ValueKey]] = []
    for index in reversed(range(len(bounds))):
        start, stop = bounds[index]
        passed_on = {
            key
            for key in (received[0] if received else ())
            if not any(start <= each.block < stop for each in occurrences.get(key, ()))
        }
        received.insert(0, passed_on | set(requirements[index].skip_values))
        _check_skip_values(trace, received[0], occurrences, bounds=bounds, index=index)
    return received


def _buffers_of_stages(model: nn.Module, trace: ForwardTrace, bounds: Bounds) -> list[frozenset[str]]:
    """Return the buffers that each stage computes with.

    Raises:
        LayoutError: several stages use a buffer that a block writes to, and each would see only its own writes.
        NoChain: code outside the blocks reads a buffer that a block writes to; only the block's stage has its values.
    """
    stages_by_buffer = {
        name: [index for index, bound in enumerate(bounds) if blocks & {*range(*bound)}]
        for name, blocks in trace.buffer_uses.items()
    }
    norms = {name: module for name, module in model.named_modules() if isinstance(module, NormBase) and module.training}
    statistics = {f"{name}.{buffer}" for name, norm in norms.items() for buffer, _ in norm.named_buffers()}
    for name, stages in sorted(stages_by_buffer.items()):
        is_written = name in statistics or any(block is not None for block in trace.buffer_writes.get(name, ()))
        if len(stages) > 1 and is_written:
            raise LayoutError(
                f"stages {', '.join(map(str, stages))} use the buffer {name}, and their forward writes to it: one "
                "process has all of these writes, but each stage would have only its own.",
                cause="one module with a buffer in several blocks, or one buffer in several modules",
                hint="a module for each block, --place.stages with all of them on one stage, or --layout fsdp",
            )
        if stages and is_written and None in trace.buffer_uses[name]:
            raise NoChain(
                f"the forward reads the buffer {name} outside of its block, but only stage {stages[0]} has the values "
                "written to it.",
                cause="a copy of the model (copy.deepcopy), its state_dict(), or code that reads running statistics",
                hint="read it inside of its block; or --layout ddp or fsdp",
            )
    outside = {name for name, blocks in trace.buffer_uses.items() if None in blocks}
    return [
        frozenset(outside | {name for name, stages in stages_by_buffer.items() if index in stages})
        for index in range(len(bounds))
    ]


def _parameters_read_outside(trace: ForwardTrace) -> Iterator[str]:
    """Yield the parameters that operations outside the blocks read and that no operation overwrites."""
    for node in trace.nodes:
        for index in node.inputs if node.block is None else ():
            name = trace.nodes[index].parameter
            if name is not None and index not in trace.overwritten_nodes:
                yield name


def _find_occurrences(trace: ForwardTrace) -> dict[ValueKey, list[Occurrence]]:
    occurrences: dict[ValueKey, list[Occurrence]] = {}
    for block, block_call in enumerate(trace.calls):
        for is_output, keys in ((False, block_call.inputs), (True, block_call.outputs)):
            for path, key in keys.items():
                occurrences.setdefault(key, []).append(Occurrence(block, is_output, path))
    return occurrences


def _check_skip_values(
    trace: ForwardTrace, keys: set[ValueKey], occurrences: Occurrences, *, bounds: Bounds, index: int
) -> None:
    """Raise if a skip value that a stage receives does not occur in the blocks of an earlier stage."""
    start = bounds[index][0]
    for key in keys:
        if not any(each.block < start for each in occurrences.get(key, ())):
            node = trace.nodes[key[0]]
            raise NoChain(
                f"stage {index} needs a value ({node.name}, made before {trace.blocks[start].name}) "
                "that no block of an earlier stage takes or returns, so it can't be sent there.",
                hint="cut elsewhere (--place.stages), or pass it to the blocks as an argument",
            )


def _is_draw_next(trace: ForwardTrace, start: int) -> bool:
    """Return whether a random draw follows this stage boundary before a block starts its own random stream."""
    return next((is_draw for position, is_draw in trace.random_events if position >= 2 * start), False)


def _parameters_of_stages(
    model: nn.Module, trace: ForwardTrace, requirements: Sequence[StageRequirements]
) -> list[frozenset[str]]:
    """Return the parameters of each stage: those that it uses, and unused parameters of the same modules."""
    names = [name for name, _ in model.named_parameters()]
    block_parameters = _block_parameter_names(model, trace.blocks)
    held = [set(each.parameters) for each in requirements]
    for index, each in enumerate(requirements):
        held[index] |= {name for block in range(each.start, each.stop) for name in block_parameters[block]}
    first_in_blocks = min((names.index(name) for name in block_parameters[0]), default=0)
    for position, name in enumerate(names):
        if not any(name in parameters for parameters in held):
            default_stage = 0 if position < first_in_blocks else len(held) - 1
            for index in _stages_of_same_module(name, held) or [default_stage]:
                held[index].add(name)
    return [frozenset(parameters) for parameters in held]


def _stages_of_same_module(name: str, held: Sequence[set[str]]) -> list[int]:
    module = name.rpartition(".")[0]
    if not module:
        return []
    return [index for index, names in enumerate(held) if any(other.startswith(f"{module}.") for other in names)]


def _block_parameter_names(model: nn.Module, blocks: Sequence[Block]) -> list[list[str]]:
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[first_names[id(parameter)] for parameter in block.module.parameters()] for block in blocks]
