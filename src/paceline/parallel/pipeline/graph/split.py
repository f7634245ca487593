"""The split of a graph into stages; all values that are live at a boundary are sent, including skip connections.

A boundary is the position between two calls of modules with parameters at which the fewest bytes are live. It is stored
as the preceding call and the number of steps after this call, so that graphs of other shapes have the same boundaries.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import Node

from paceline.errors import LayoutError
from paceline.parallel.pipeline.graph.module_graph import Graph, ModuleCall, aliased_arguments, updated_running_stats
from paceline.parallel.pipeline.stage_bounds import Bounds
from paceline.parallel.pipeline.stage_parameters import parameters_of_several_stages, stages_of_parameter

_UNKNOWN_BYTES = 1 << 62
"""The size of a tensor whose shape depends on the data: larger than any other, so that it is not sent if possible."""


@dataclass(frozen=True, kw_only=True)
class StageBoundary:
    """A boundary between stages: `num_graph_steps` steps after the module call `preceding_call`.

    A step is an entry of `Graph.steps`: another module call, or an operation between module calls.
    """

    preceding_call: str
    num_graph_steps: int


@dataclass(frozen=True, kw_only=True)
class GraphStage:
    """A stage of a graph: the parameters that it holds, the modules that it calls, and the buffers that it uses."""

    index: int
    parameters: frozenset[str]
    modules: frozenset[str]
    buffers: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class GraphStageSplit:
    """A graph split into stages; it is determined by the model, and equal on every rank.

    `units` are the modules that a boundary never splits, `blocks` the calls between which boundaries may be, and
    `bounds` the indices of each stage's blocks.
    `stage_of_buffer` is the stage of each buffer to which operations between module calls write.
    """

    units: tuple[str, ...]
    blocks: tuple[str, ...]
    bounds: Bounds
    boundaries: tuple[StageBoundary, ...]
    stages: tuple[GraphStage, ...]
    stage_of_buffer: Mapping[str, int]

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
            "borders": [[boundary.preceding_call, boundary.num_graph_steps] for boundary in self.boundaries],
            "ties": {name: list(stages) for name, stages in self.ties.items()},
        }


class LiveValues:
    """The values that are live between the steps of a graph, and the positions at which a stage can end.

    Position i is before step i. A value is live at the positions between its creation and its last use.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._last_use: dict[str, int] = {}
        self._created_by: dict[str, int] = {}
        for index, step in enumerate(graph.steps):
            self._last_use.update(dict.fromkeys(step.input_names, index))
            for name in step.output_names:
                self._created_by.setdefault(name, index)
        self._last_use.update({value.name: len(graph.steps) for value in graph.outputs if value.name})
        self._alias_groups, self._writes_of_group = _alias_groups_and_writes(graph)

    def live_at(self, position: int) -> tuple[str, ...]:
        """Return the values that are live at a position, in the order of their creation."""
        return tuple(n for n, step in self._created_by.items() if step < position <= self._last_use.get(n, -1))

    def dead_after(self, index: int) -> Iterator[str]:
        """Return the inputs and outputs of a step that no later step uses."""
        step = self.graph.steps[index]
        return (name for name in (*step.input_names, *step.output_names) if self._last_use.get(name, -1) <= index)

    def live_bytes(self, position: int) -> int:
        """Return the bytes of the values that are live at a position."""
        return sum(node_bytes(self.graph.nodes[name]) or 0 for name in self.live_at(position))

    def cut_obstacle(self, position: int) -> str:
        """Return the reason why no stage can end at this position; "" if a stage can."""
        live_names = self.live_at(position)
        for name in live_names:
            if node_bytes(self.graph.nodes[name]) is None:
                class_name = type(self.graph.nodes[name].meta.get("val")).__name__
                return f"{self.describe(name)}, a {class_name} and not a tensor, would have to cross"
        for group, writes in self._writes_of_group.items():
            aliases = self._alias_groups[group]
            live_aliases = [name for name in live_names if name in aliases]
            initial_aliases = [name for name in aliases if name not in self._created_by]
            used_later = [name for name in initial_aliases if self._last_use.get(name, -1) >= position]
            is_written_later = any(write >= position for write in writes)
            if is_written_later and len(live_aliases) > 1:
                first, second = map(self.describe, live_aliases[:2])
                return f"{first} and {second} share memory that is overwritten after the cut"
            if is_written_later and live_aliases and used_later:
                return f"{self.describe(live_aliases[0])} and {used_later[0]} share memory overwritten after the cut"
            if used_later and any(write < position for write in writes):
                return f"{used_later[0]} is overwritten before the cut and used after it"
        return ""

    def describe(self, name: str) -> str:
        """Return a description of a value and its operation, for messages."""
        node, index = self.graph.nodes[name], self.graph.enclosing_steps.get(name)
        made_in = f" made in {self.graph.steps[index].name}" if index is not None else ""
        operation = node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else name
        return f"a value ({operation}){made_in}"

    def has_writes(self, start: int, stop: int) -> bool:
        """Return whether one of the steps from `start` until before `stop` overwrites memory."""
        return any(start <= write < stop for writes in self._writes_of_group.values() for write in writes)

    def has_draws_before(self, position: int) -> bool:
        """Return whether a step before this position draws random numbers."""
        return any(step.draws_random for step in self.graph.steps[:position])


def boundary_position(boundary: StageBoundary, live_values: LiveValues, *, blocks: Collection[str]) -> int:
    """Return the position of a boundary in a graph; it is never after the next call of one of the blocks.

    Raises:
        LayoutError: the forward takes a different path than the traced one.
    """
    steps = live_values.graph.steps
    calls = {step.name: index for index, step in enumerate(steps) if isinstance(step, ModuleCall)}
    if boundary.preceding_call not in calls:
        raise LayoutError(
            f"with these inputs the forward does not call {boundary.preceding_call}, after which the model was cut.",
            cause="a branch on a shape, an argument or train() and eval() that leaves modules out",
            hint="--place.blocks with the modules that every forward calls",
        )
    call_index = calls[boundary.preceding_call]
    later_blocks = (index for name, index in calls.items() if name in blocks and index > call_index)
    position = min(call_index + 1 + boundary.num_graph_steps, next(later_blocks, len(steps)))
    obstacle = live_values.cut_obstacle(position)
    if obstacle:
        raise LayoutError(
            f"with these inputs the model can't be cut after {boundary.preceding_call}: {obstacle}.",
            cause="a branch on a shape, an argument or train() and eval()",
            hint="--place.stages with a different border",
        )
    return position


def split_graph(
    model: nn.Module, graph: Graph, *, units: Sequence[str], block_steps: Sequence[int], bounds: Bounds
) -> GraphStageSplit:
    """Split a graph into stages.

    `block_steps` are the steps that call the blocks, between which boundaries may be; `bounds` are the blocks of each
    stage.

    Raises:
        LayoutError: no stage can end between two blocks; the message names the value that can't be sent.
    """
    live_values = LiveValues(graph)
    gaps = [(block_steps[stop - 1], block_steps[stop]) for _, stop in bounds[:-1]]
    positions = [_cheapest_position(live_values, block, next_block) for block, next_block in gaps]
    ranges = list(zip([0, *positions], [*positions, len(graph.steps)], strict=True))
    used_tensors = [_used_tensors(graph, start, stop) for start, stop in ranges]
    used_buffers = [buffers for _, buffers in used_tensors]
    _refuse_shared_written_buffers(graph, used_buffers)
    used_parameters = [
        _used_parameters(model, graph, start, stop) | canonical_names(model, parameters)
        for (start, stop), (parameters, _) in zip(ranges, used_tensors, strict=True)
    ]
    return GraphStageSplit(
        units=tuple(units),
        blocks=tuple(graph.steps[index].name for index in block_steps),
        bounds=bounds,
        boundaries=tuple(
            StageBoundary(preceding_call=graph.steps[block].name, num_graph_steps=position - block - 1)
            for (block, _), position in zip(gaps, positions, strict=True)
        ),
        stages=tuple(
            GraphStage(
                index=stage,
                parameters=parameters,
                modules=frozenset(s.module_name for s in graph.steps[start:stop] if isinstance(s, ModuleCall)),
                buffers=frozenset(used_buffers[stage]),
            )
            for stage, ((start, stop), parameters) in enumerate(
                zip(ranges, _add_unused_parameters(model, used_parameters), strict=True)
            )
        ),
        stage_of_buffer=_stages_of_written_buffers(graph, ranges),
    )


def parameters_between_calls(graph: Graph, start: int, stop: int) -> Iterator[str]:
    """Yield the parameters that operations between module calls of a stage use, or that the last stage returns."""
    names = [name for step in graph.steps[start:stop] for name in step.input_names]
    for name in [*names, *_returned_names(graph, stop)]:
        source = graph.sources.get(name)
        if source is not None and source.kind is InputKind.PARAMETER:
            yield source.target


def canonical_names(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the names of these parameters in `named_parameters()`, which lists tied parameters once."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    return {name_of[id(model.get_parameter(name))] for name in names}


def _returned_names(graph: Graph, stop: int) -> list[str]:
    """Return the names of the forward's outputs if `stop` is the end of the last stage, else an empty list."""
    return [value.name for value in graph.outputs if value.name] if stop == len(graph.steps) else []


def _used_parameters(model: nn.Module, graph: Graph, start: int, stop: int) -> set[str]:
    """Return the parameters of the modules that a stage calls, and those that it uses between the calls."""
    calls = [step.module_name for step in graph.steps[start:stop] if isinstance(step, ModuleCall)]
    ids = {id(p) for call in calls for p in model.get_submodule(call).parameters()}
    between_calls = canonical_names(model, parameters_between_calls(graph, start, stop))
    return between_calls | {name for name, p in model.named_parameters() if id(p) in ids}


def _add_unused_parameters(model: nn.Module, used_parameters: Sequence[set[str]]) -> list[frozenset[str]]:
    """Return the parameters of each stage; an unused parameter joins the parameter registered before it."""
    parameters_of_stage, last_stage = [set(names) for names in used_parameters], 0
    for name, _ in model.named_parameters():
        stages = [stage for stage, names in enumerate(used_parameters) if name in names]
        if stages:
            last_stage = stages[-1]
        else:
            parameters_of_stage[last_stage].add(name)
    return [frozenset(names) for names in parameters_of_stage]


def _cheapest_position(live_values: LiveValues, block: int, next_block: int) -> int:
    """Return the first position with the fewest live bytes, of those between two blocks where a stage can end."""
    positions = [position for position in range(block + 1, next_block + 1) if not live_values.cut_obstacle(position)]
    if not positions:
        steps = live_values.graph.steps
        raise LayoutError(
            f"the graph can't be cut between {steps[block].name} and {steps[next_block].name}: "
            f"{live_values.cut_obstacle(next_block)}.",
            cause="only tensors with their own memory can cross from stage to stage",
            hint="--place.stages with a different border, or --place.blocks with different modules",
        )
    return min(positions, key=live_values.live_bytes)


def _used_tensors(graph: Graph, start: int, stop: int) -> tuple[set[str], set[str]]:
    """Return the parameters and buffers that the operations of a stage use, also inside module calls."""
    step_indices = _indices_by_name(graph)
    names = _returned_names(graph, stop)
    for node in graph.nodes.values():
        if start <= graph.enclosing_steps.get(node.name, step_indices.get(node.name, -1)) < stop:
            names += [argument.name for argument in node.all_input_nodes]
    sources = [graph.sources[name] for name in names if name in graph.sources]
    parameters = {source.target for source in sources if source.kind is InputKind.PARAMETER}
    return parameters, {source.target for source in sources if source.kind is InputKind.BUFFER}


def _refuse_shared_written_buffers(graph: Graph, used_buffers: Sequence[set[str]]) -> None:
    """Raise `LayoutError` if two stages use a buffer that the forward writes to."""
    groups, writes = _alias_groups_and_writes(graph)
    written_buffers = {
        source.target
        for group in writes
        for name in groups.get(group, ())
        if (source := graph.sources.get(name)) is not None and source.kind is InputKind.BUFFER
    }
    for stage, buffers in enumerate(used_buffers):
        for name in sorted(buffers & written_buffers & set().union(*used_buffers[stage + 1 :])):
            raise LayoutError(
                f"the buffer {name} is written by the forward and used on several stages, but only one can keep it.",
                cause="one module called at several points of the forward, or one buffer in several modules",
                hint="--place.stages with all its uses on one stage",
            )


def _stages_of_written_buffers(graph: Graph, ranges: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Return the stage of each buffer to which operations between module calls write."""
    _, writes_of_group = _alias_groups_and_writes(graph, should_skip_module_calls=True)
    stage_of_buffer = {}
    for name, writes in writes_of_group.items():
        source = graph.sources.get(name)
        if source is not None and source.kind is InputKind.BUFFER:
            stages = (stage for stage, (start, stop) in enumerate(ranges) if start <= writes[0] < stop)
            stage_of_buffer[source.target] = next(stages)
    return stage_of_buffer


def _alias_groups_and_writes(
    graph: Graph, *, should_skip_module_calls: bool = False
) -> tuple[dict[str, set[str]], dict[str, list[int]]]:
    """Return groups of values that share memory, and the steps that write to each group, by the name of one member."""
    parent: dict[str, str] = {}  # a union-find forest over the names of the values
    step_indices = _indices_by_name(graph)

    def find_root(name: str) -> str:
        while parent.get(name, name) != name:
            name = parent[name]
        return name

    writes: list[tuple[str, int]] = []
    for node in graph.nodes.values():
        index = graph.enclosing_steps.get(node.name, step_indices.get(node.name))
        written_names = [argument.name for argument in updated_running_stats(node)]
        for argument, is_write in aliased_arguments(node):
            parent[find_root(node.name)] = find_root(argument.name)
            written_names += [argument.name] * is_write
        if index is not None and (not should_skip_module_calls or node.name in step_indices):
            writes += [(name, index) for name in written_names]
    groups: dict[str, set[str]] = {}
    for name in graph.nodes:
        groups.setdefault(find_root(name), set()).add(name)
    writes_of_group: dict[str, list[int]] = {}
    for name, index in writes:
        writes_of_group.setdefault(find_root(name), []).append(index)
    return groups, writes_of_group


def _indices_by_name(graph: Graph) -> dict[str, int]:
    return {step.name: index for index, step in enumerate(graph.steps)}


def node_bytes(node: Node) -> int | None:
    """Return a tensor's bytes, `_UNKNOWN_BYTES` if they depend on the data, or None if the value is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    numel = value.numel()
    return numel * value.element_size() if type(numel) is int else _UNKNOWN_BYTES
