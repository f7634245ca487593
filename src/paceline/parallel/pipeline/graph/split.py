"""The split of a graph into stages; all values that are live at a boundary are sent, including skip connections.

A boundary is the position between two calls of modules with parameters at which the fewest bytes are live. It is stored
as the preceding call and the number of steps after this call, so that graphs of other shapes have the same boundaries.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import Node

from paceline.errors import LayoutError
from paceline.parallel.pipeline.graph.module_graph import Graph, ModuleCall, aliased_arguments, silently_written
from paceline.parallel.pipeline.stage_bounds import Bounds
from paceline.parallel.pipeline.stage_parameters import parameters_of_several_stages, stages_of_parameter

_UNKNOWN = 1 << 62


@dataclass(frozen=True, kw_only=True)
class StageBoundary:
    """A boundary between stages: `steps` steps after a call of a module."""

    after: str
    steps: int


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

    `units` are the modules that a boundary never splits, `blocks` the calls between which boundaries may be. `buffers`
    maps each buffer that operations between modules write to its stage.
    """

    units: tuple[str, ...]
    blocks: tuple[str, ...]
    bounds: Bounds
    borders: tuple[StageBoundary, ...]
    stages: tuple[GraphStage, ...]
    buffers: Mapping[str, int]

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
            "borders": [[border.after, border.steps] for border in self.borders],
            "ties": {name: list(stages) for name, stages in self.ties.items()},
        }


class LiveValues:
    """The live values between the steps of a graph, and the positions at which a stage can end."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._last: dict[str, int] = {}
        self._made: dict[str, int] = {}
        for place, step in enumerate(graph.steps):
            self._last.update(dict.fromkeys(step.uses, place))
            for name in step.makes:
                self._made.setdefault(name, place)
        self._last.update({value.name: len(graph.steps) for value in graph.outputs if value.name})
        self._groups, self._writes = _memory(graph)

    def over(self, place: int) -> tuple[str, ...]:
        """Return the values that exist before a step and are used by it or later, in the order of their creation."""
        return tuple(name for name, made in self._made.items() if made < place <= self._last.get(name, -1))

    def dead(self, place: int) -> Iterator[str]:
        """Return the values of this step that no later step uses."""
        step = self.graph.steps[place]
        return (name for name in (*step.uses, *step.makes) if self._last.get(name, -1) <= place)

    def num_bytes(self, place: int) -> int:
        """Return the bytes of the values that are live before a step."""
        return sum(num_bytes(self.graph.values[name]) or 0 for name in self.over(place))

    def trouble(self, place: int) -> str:
        """Return the reason why no stage can end before this step, or ""."""
        live = self.over(place)
        for name in live:
            if num_bytes(self.graph.values[name]) is None:
                kind = type(self.graph.values[name].meta.get("val")).__name__
                return f"{self.words(name)}, a {kind} and not a tensor, would have to cross"
        for group, writes in self._writes.items():
            given = [name for name in self._groups[group] if name not in self._made]
            mine = [name for name in live if name in self._groups[group]]
            later = any(write >= place for write in writes)
            used_later = [name for name in given if self._last.get(name, -1) >= place]
            if later and len(mine) > 1:
                return f"{self.words(mine[0])} and {self.words(mine[1])} share memory that is overwritten after it"
            if later and mine and used_later:
                return f"{self.words(mine[0])} and {used_later[0]} share memory that is overwritten after it"
            if used_later and any(write < place for write in writes):
                return f"{used_later[0]} is overwritten before it and used after it"
        return ""

    def words(self, name: str) -> str:
        """Return a description of a value and its operation, for messages."""
        node, place = self.graph.values[name], self.graph.inside.get(name)
        maker = f" made in {self.graph.steps[place].name}" if place is not None else ""
        kind = node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else name
        return f"a value ({kind}){maker}"

    def writes_in(self, start: int, stop: int) -> bool:
        """Return whether a step from `start` to `stop` overwrites memory."""
        return any(start <= write < stop for writes in self._writes.values() for write in writes)

    def draws_before(self, place: int) -> bool:
        """Return whether a step before `place` draws random numbers."""
        return any(step.draws for step in self.graph.steps[:place])


def place_of(border: StageBoundary, live: LiveValues, *, blocks: Collection[str]) -> int:
    """Return the step of a graph before which a boundary is; it is never later than the next of the blocks.

    Raises:
        LayoutError: the forward takes a different path than the traced one.
    """
    calls = {step.name: place for place, step in enumerate(live.graph.steps) if isinstance(step, ModuleCall)}
    if border.after not in calls:
        raise LayoutError(
            f"with these inputs the forward does not call {border.after}, after which the model was cut.",
            cause="a branch on a shape, an argument or train() and eval() that leaves modules out",
            hint="--place.blocks with the modules that every forward calls",
        )
    place = calls[border.after] + 1 + border.steps
    later = (at for name, at in calls.items() if name in blocks and at > calls[border.after])
    following = next(later, len(live.graph.steps))
    place = min(place, following)
    trouble = live.trouble(place)
    if trouble:
        raise LayoutError(
            f"with these inputs the model can't be cut after {border.after}: {trouble}.",
            cause="a branch on a shape, an argument or train() and eval()",
            hint="--place.stages with a different border",
        )
    return place


def cut_graph(
    model: nn.Module, graph: Graph, *, units: Sequence[str], blocks: Sequence[int], bounds: Bounds
) -> GraphStageSplit:
    """Split a graph into stages; `blocks` are the steps between which boundaries may be, in stages by `bounds`.

    Raises:
        LayoutError: no stage can end between two blocks; the message names the value that can't be sent.
    """
    live = LiveValues(graph)
    places = [_cheapest(live, blocks[stop - 1] + 1, blocks[stop]) for _, stop in bounds[:-1]]
    ranges = list(zip([0, *places], [*places, len(graph.steps)], strict=True))
    modules = [{s.module for s in graph.steps[start:stop] if isinstance(s, ModuleCall)} for start, stop in ranges]
    used = [_used(graph, start, stop) for start, stop in ranges]
    _check_buffers(graph, [buffers for _, buffers in used])
    held = _held(
        model,
        [_parameters(model, graph, *each) | _firsts(model, mine) for each, (mine, _) in zip(ranges, used, strict=True)],
    )
    return GraphStageSplit(
        units=tuple(units),
        blocks=tuple(graph.steps[place].name for place in blocks),
        bounds=bounds,
        borders=tuple(
            StageBoundary(after=graph.steps[blocks[stop - 1]].name, steps=place - blocks[stop - 1] - 1)
            for (_, stop), place in zip(bounds[:-1], places, strict=True)
        ),
        stages=tuple(
            GraphStage(
                index=index,
                parameters=held[index],
                modules=frozenset(modules[index]),
                buffers=frozenset(used[index][1]),
            )
            for index in range(len(ranges))
        ),
        buffers=_written_buffers(graph, ranges),
    )


def parameters_in(graph: Graph, start: int, stop: int) -> Iterator[str]:
    """Yield the parameters that operations between module calls of a stage use, or that the last stage returns."""
    names = [name for step in graph.steps[start:stop] for name in step.uses]
    for name in [*names, *_returned(graph, stop)]:
        source = graph.sources.get(name)
        if source is not None and source.kind is InputKind.PARAMETER:
            yield source.target


def _returned(graph: Graph, stop: int) -> list[str]:
    """Return the names of the forward's outputs if a stage that ends at this step is the last one."""
    return [value.name for value in graph.outputs if value.name] if stop == len(graph.steps) else []


def _parameters(model: nn.Module, graph: Graph, start: int, stop: int) -> set[str]:
    first = {id(p): name for name, p in model.named_parameters()}
    direct = {first[id(model.get_parameter(name))] for name in parameters_in(graph, start, stop)}
    calls = [step.module for step in graph.steps[start:stop] if isinstance(step, ModuleCall)]
    return direct | {first[id(p)] for name in calls for p in model.get_submodule(name).parameters()}


def _held(model: nn.Module, used: Sequence[set[str]]) -> list[frozenset[str]]:
    """Return the parameters of each stage: those that it uses, and unused parameters registered after them."""
    held, home = [set(mine) for mine in used], 0
    for name, _ in model.named_parameters():
        found = [index for index, mine in enumerate(used) if name in mine]
        home = found[-1] if found else home
        if not found:
            held[home].add(name)
    return [frozenset(mine) for mine in held]


def _cheapest(live: LiveValues, start: int, stop: int) -> int:
    """Return the first position with the fewest live bytes among those at which a stage can end."""
    places = range(start, stop + 1)
    good = [place for place in places if not live.trouble(place)]
    if not good:
        raise LayoutError(
            f"the graph can't be cut between {live.graph.steps[start - 1].name} and {live.graph.steps[stop].name}: "
            f"{live.trouble(stop)}.",
            cause="only tensors with their own memory can cross from stage to stage",
            hint="--place.stages with a different border, or --place.blocks with different modules",
        )
    return min(good, key=live.num_bytes)


def _used(graph: Graph, start: int, stop: int) -> tuple[set[str], set[str]]:
    """Return the parameters and buffers that the operations of a stage use, including those of other modules."""
    steps = {step.name: place for place, step in enumerate(graph.steps)}
    found: dict[InputKind | None, set[str]] = {InputKind.PARAMETER: set(), InputKind.BUFFER: set()}
    for node in graph.values.values():
        if start <= graph.inside.get(node.name, steps.get(node.name, -1)) < stop:
            for given in node.all_input_nodes:
                source = graph.sources.get(given.name)
                if source is not None and source.kind in found:
                    found[source.kind].add(source.target)
    for name in _returned(graph, stop):
        source = graph.sources.get(name)
        if source is not None and source.kind in found:
            found[source.kind].add(source.target)
    return found[InputKind.PARAMETER], found[InputKind.BUFFER]


def _firsts(model: nn.Module, names: Collection[str]) -> set[str]:
    """Return the names of these parameters in `named_parameters()`, which lists tied parameters once."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {first[id(model.get_parameter(name))] for name in names}


def _check_buffers(graph: Graph, used: Sequence[set[str]]) -> None:
    """Raise `LayoutError` if two stages use a buffer that the forward writes to."""
    groups, writes = _memory(graph)
    written = {
        source.target
        for group in writes
        for name in groups.get(group, ())
        if (source := graph.sources.get(name)) is not None and source.kind is InputKind.BUFFER
    }
    for index, mine in enumerate(used):
        for name in sorted(mine & written & set().union(*used[index + 1 :])):
            raise LayoutError(
                f"the buffer {name} is written by the forward and used on several stages, but only one can keep it.",
                cause="one module called at several points of the forward, or one buffer in several modules",
                hint="--place.stages with all its uses on one stage",
            )


def _written_buffers(graph: Graph, ranges: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Return the stage of each buffer to which operations between module calls write."""
    _, writes = _memory(graph, directly=True)
    found = {}
    for name, places in writes.items():
        source = graph.sources.get(name)
        if source is not None and source.kind is InputKind.BUFFER:
            found[source.target] = next(i for i, (start, stop) in enumerate(ranges) if start <= places[0] < stop)
    return found


def _memory(graph: Graph, directly: bool = False) -> tuple[dict[str, set[str]], dict[str, list[int]]]:
    """Return groups of values that share memory, by the name of one member, and the steps that write to each group."""
    root: dict[str, str] = {}
    steps = {step.name: place for place, step in enumerate(graph.steps)}

    def top(name: str) -> str:
        while root.get(name, name) != name:
            name = root[name]
        return name

    wrote: list[tuple[str, int]] = []
    for node in graph.values.values():
        place = graph.inside.get(node.name, steps.get(node.name))
        written = [argument.name for argument in silently_written(node)]
        for argument, is_write in aliased_arguments(node):
            root[top(node.name)] = top(argument.name)
            written += [argument.name] * is_write
        if place is not None and (not directly or node.name in steps):
            wrote += [(name, place) for name in written]
    groups: dict[str, set[str]] = {}
    for name in graph.values:
        groups.setdefault(top(name), set()).add(name)
    writes: dict[str, list[int]] = {}
    for name, place in wrote:
        writes.setdefault(top(name), []).append(place)
    return groups, writes


def num_bytes(node: Node) -> int | None:
    """Return a tensor's bytes, `_UNKNOWN` if they depend on the data, or None for other values."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    numel = value.numel()
    return numel * value.element_size() if type(numel) is int else _UNKNOWN
