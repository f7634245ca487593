"""The split of a model into stages, derived from one traced forward: what each stage holds, receives and sends.

Each stage runs the model's own forward up to its last block. The block before its first block returns the received
output; other modules that the stage does not hold return placeholders. So the stage's blocks and the code between them
may use only the received output, the batch, parameters that the stage holds, and skip values. A skip value is sent from
an earlier stage and passed to a block as an argument, for example the output of an encoder.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from paceline.errors import LayoutError
from paceline.parallel.module_access.blocks import Block, NoChain, find_blocks
from paceline.parallel.pipeline.chain.placeholders import Form, form_of
from paceline.parallel.pipeline.chain.requirements import DataDependentBranch, StageRequirements, needs_of
from paceline.parallel.pipeline.chain.suggestions import suggest_split
from paceline.parallel.pipeline.chain.trace_module_calls import ForwardTrace, Key, trace_forward
from paceline.parallel.pipeline.stage_bounds import Bounds, balanced_bounds, bounds_from_counts
from paceline.parallel.pipeline.stage_io import OutputClasses, Path
from paceline.parallel.pipeline.stage_parameters import parameters_of_several_stages, stages_of_parameter
from paceline.torch_internals.private_api import NormBase

Sight = tuple[int, bool, Path]


@dataclass(frozen=True, kw_only=True)
class SkipValue:
    """A value that is sent between stages in addition to the blocks' outputs.

    `sights` are (block, whether it is an output, path); `targets` are the arguments (block, path) that get it.
    """

    sights: tuple[Sight, ...]
    targets: tuple[tuple[int, Path], ...]

    def sight(self, part: "ChainStage") -> Sight | None:
        """Return the occurrence in the blocks of this stage; None if the stage only passes the value on."""
        return next((sight for sight in self.sights if part.start <= sight[0] < part.stop), None)


@dataclass(frozen=True, kw_only=True)
class ChainStage:
    """A pipeline stage: blocks `start` to `stop`, and the parameters that it holds.

    `takes` and `gives` number the skip values that it receives and sends. `buffers` are those with which its
    blocks or the code around all blocks compute, in any module. `takes_stream`: whether the random generator's
    state is received too, for draws between two blocks. `copies`: whether received tensors are overwritten in
    place, which autograd allows only on a clone.
    """

    index: int
    start: int
    stop: int
    parameters: frozenset[str]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    takes_stream: bool
    copies: bool
    buffers: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class StageSplit:
    """A model split into stages along its blocks; it is determined by the model, and equal on every rank.

    `used` are used outside the blocks; `read` are read between the blocks and never
    overwritten. `counts` is an attribute that each forward changes. `enclosed` is a block that an
    autograd function calls, with the name of the function.
    """

    blocks: tuple[str, ...]
    bounds: Bounds
    stages: tuple[ChainStage, ...]
    carried: tuple[SkipValue, ...]
    kinds: OutputClasses
    forms: tuple[Form | None, ...]
    used: frozenset[str]
    read: frozenset[str]
    counts: str
    enclosed: tuple[str, str] | None = None

    def runs(self, parameters: set[str], *, stage: int) -> bool:
        """Return whether a module outside the blocks, with these parameters, runs on a stage, not its placeholder."""
        held, used = self.stages[stage].parameters, parameters & self.used
        return (bool(used) and used <= held) or parameters <= held

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.stages)

    @cached_property
    def ties(self) -> Mapping[str, tuple[int, ...]]:
        """Return the parameters that several stages hold, with these stages; their gradients are summed over them."""
        return parameters_of_several_stages(self.stages)

    def stages_of_parameter(self, name: str) -> tuple[int, ...]:
        """Return the stages that hold a parameter; `name` is its name in `named_parameters()`."""
        return stages_of_parameter(name, self.stages)

    def as_json(self) -> dict[str, Any]:
        """Return the split as JSON values, for plan.json and for comparing ranks."""
        return {
            "blocks": list(self.blocks),
            "bounds": [list(bound) for bound in self.bounds],
            "carried": [[list(sight[:2]) for sight in value.sights[:1]] for value in self.carried],
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
    found = find_blocks(model, listed_names=blocks)
    chosen = (
        bounds_from_counts(bounds, num_stages, len(found)) if bounds else balanced_bounds(num_stages, found, weights)
    )
    flow = trace_forward(model, blocks=found, call=call)
    try:
        return cut_flow(model, flow=flow, bounds=chosen)
    except DataDependentBranch as error:
        works = suggest_split(
            model,
            flow=flow,
            num_stages=num_stages,
            cut=lambda flow, bounds: cut_flow(model, flow=flow, bounds=bounds),
            watch=lambda names: trace_forward(model, blocks=find_blocks(model, listed_names=names), call=call),
        )
        hint = f"{works}; or move it into a block" if works else error.hint
        raise LayoutError(error.what, where=error.where, cause=error.cause, hint=hint) from error


def cut_flow(model: nn.Module, *, flow: ForwardTrace, bounds: Bounds) -> StageSplit:
    """Return the split for these bounds.

    Stages are built from last to first, because each stage also sends the skip values that later stages need.
    """
    buffers = _buffers_of_stages(model, flow, bounds)
    needs = [needs_of(flow, start=start, stop=stop, last=stop == len(flow.blocks)) for start, stop in bounds]
    sights = _sights(flow)
    keys: list[Key] = []
    targets: dict[Key, list[tuple[int, Path]]] = {}
    takes: list[set[Key]] = [set() for _ in bounds]
    wanted: set[Key] = set()
    for index in reversed(range(len(bounds))):
        start, stop = bounds[index]
        takes[index] = {key for key in wanted if not any(start <= sight[0] < stop for sight in sights.get(key, ()))}
        for key, places in needs[index].carried.items():
            targets.setdefault(key, []).extend(places)
            takes[index].add(key)
        _check_seen(flow, takes[index], sights, bounds=bounds, index=index)
        keys += [key for key in sorted(takes[index]) if key not in keys]
        wanted = takes[index]
    number = {key: place for place, key in enumerate(keys)}
    ordered = [tuple(number[key] for key in sorted(chosen)) for chosen in takes]
    held = _held(model, flow, needs)
    parts = [
        ChainStage(
            index=index,
            start=start,
            stop=stop,
            parameters=held[index],
            takes=ordered[index],
            gives=ordered[index + 1] if index + 1 < len(bounds) else (),
            takes_stream=bool(start) and _draws_first(flow, start),
            copies=bool(start) and any(key[0] in flow.changed for key in flow.calls[start - 1].gives.values()),
            buffers=buffers[index],
        )
        for index, (start, stop) in enumerate(bounds)
    ]
    carried = [SkipValue(sights=tuple(sights[key]), targets=tuple(targets.get(key, ()))) for key in keys]
    return StageSplit(
        blocks=tuple(block.name for block in flow.blocks),
        bounds=bounds,
        stages=tuple(parts),
        carried=tuple(carried),
        kinds=OutputClasses.of([seen.output for seen in flow.calls]),
        forms=tuple(
            form_of(seen.output, where=block.name, given=seen.given)
            for block, seen in zip(flow.blocks, flow.calls, strict=True)
        ),
        used=frozenset(name for need in needs for name in need.parameters),
        read=frozenset(_read_between(flow)),
        counts=flow.counts,
        enclosed=flow.enclosed,
    )


def _buffers_of_stages(model: nn.Module, flow: ForwardTrace, bounds: Bounds) -> list[frozenset[str]]:
    """Return the buffers that each stage computes with.

    Raises:
        LayoutError: several stages use a buffer that a block writes to: each would see only its own writes.
        NoChain: the code around the blocks reads such a buffer, which is current only on its own stage.
    """
    stages = {
        name: [at for at, bound in enumerate(bounds) if blocks & {*range(*bound)}] for name, blocks in flow.used.items()
    }
    live = {name: m for name, m in model.named_modules() if isinstance(m, NormBase) and m.training}
    norms = {f"{name}.{own}" for name, norm in live.items() for own, _ in norm.named_buffers()}
    for name, among in sorted(stages.items()):
        is_written = name in norms or any(block is not None for block in flow.wrote.get(name, ()))
        if len(among) > 1 and is_written:
            raise LayoutError(
                f"stages {', '.join(map(str, among))} use the buffer {name}, and their forward writes to it: one "
                "process has all of these writes, but each stage would have only its own.",
                cause="one module with a buffer in several blocks, or one buffer in several modules",
                hint="a module for each block, --place.stages with all of them on one stage, or --layout fsdp",
            )
        if among and is_written and None in flow.used[name]:
            raise NoChain(
                f"the forward reads the buffer {name} outside of its block, but only stage {among[0]} has the values "
                "written to it.",
                cause="a copy of the model (copy.deepcopy), its state_dict(), or code that reads running statistics",
                hint="read it inside of its block; or --layout ddp or fsdp",
            )
    own = {name for name in norms if stages.get(name)}  # forwards save and restore running statistics
    around = {name for name, blocks in flow.used.items() if None in blocks and name not in own}
    return [frozenset(around | {name for name, among in stages.items() if at in among}) for at in range(len(bounds))]


def _read_between(flow: ForwardTrace) -> Iterator[str]:
    """Yield the parameters that operations outside the blocks read and that no operation overwrites."""
    for node in flow.nodes:
        for number in node.inputs if node.block is None else ():
            name = flow.nodes[number].parameter
            if name is not None and number not in flow.changed:
                yield name


def _sights(flow: ForwardTrace) -> dict[Key, list[Sight]]:
    found: dict[Key, list[Sight]] = {}
    for block, seen in enumerate(flow.calls):
        for is_output, values in ((False, seen.takes), (True, seen.gives)):
            for path, key in values.items():
                found.setdefault(key, []).append((block, is_output, path))
    return found


def _check_seen(
    flow: ForwardTrace, keys: set[Key], sights: Mapping[Key, Sequence[Sight]], *, bounds: Bounds, index: int
) -> None:
    start = bounds[index][0]
    for key in keys:
        if not any(sight[0] < start for sight in sights.get(key, ())):
            node = flow.nodes[key[0]]
            raise NoChain(
                f"stage {index} needs a value ({node.name}, made before {flow.blocks[start].name}) "
                "that no block of an earlier stage takes or returns, so it can't be sent there.",
                hint="cut elsewhere with bounds=, or pass it to the blocks as an argument",
            )


def _draws_first(flow: ForwardTrace, start: int) -> bool:
    """Return whether a random draw follows this stage boundary before a block starts its own random stream."""
    return next((draw for place, draw in flow.events if place >= 2 * start), False)


def _held(model: nn.Module, flow: ForwardTrace, needs: Sequence[StageRequirements]) -> list[frozenset[str]]:
    """Return the parameters of each stage: those that it uses, and unused parameters of the same modules."""
    names = [name for name, _ in model.named_parameters()]
    in_blocks = _names_in_blocks(model, flow.blocks)
    held = [set(need.parameters) for need in needs]
    for index, need in enumerate(needs):
        held[index] |= {name for block in range(need.start, need.stop) for name in in_blocks[block]}
    first = min((names.index(name) for name in in_blocks[0]), default=0)
    for place, name in enumerate(names):
        if not any(name in mine for mine in held):
            home = _neighbours(name, held) or [0 if place < first else len(held) - 1]
            for index in home:
                held[index].add(name)
    return [frozenset(mine) for mine in held]


def _neighbours(name: str, held: Sequence[set[str]]) -> list[int]:
    prefix = name.rpartition(".")[0]
    if not prefix:
        return []
    return [index for index, mine in enumerate(held) if any(other.startswith(f"{prefix}.") for other in mine)]


def _names_in_blocks(model: nn.Module, blocks: Sequence[Block]) -> list[list[str]]:
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[first[id(parameter)] for parameter in block.module.parameters()] for block in blocks]
