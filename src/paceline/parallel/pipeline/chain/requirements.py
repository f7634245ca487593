"""The values of other stages that a stage needs, derived from the traced forward."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.errors import LayoutError
from paceline.parallel.module_access.blocks import NoChain
from paceline.parallel.pipeline.chain.trace_module_calls import ForwardTrace, Key, Node
from paceline.parallel.pipeline.stage_io import Path


class DataDependentBranch(LayoutError):
    """The error for a forward that branches on a value that a stage does not have; other bounds may avoid it."""


@dataclass(kw_only=True)
class StageRequirements:
    """The parameters that a stage needs outside its blocks, and the values carried to it.

    `carried` maps each value to the arguments (block, path) as which it is passed.
    """

    start: int
    stop: int
    parameters: set[str] = field(default_factory=set)
    carried: dict[Key, list[tuple[int, Path]]] = field(default_factory=dict)


def needs_of(flow: ForwardTrace, *, start: int, stop: int, last: bool) -> StageRequirements:
    """Return the requirements of the stage with blocks `start` to `stop`.

    Raises:
        LayoutError: the stage needs a value of another stage that can't be passed to it.
    """
    return _Stage(flow, start, stop, last).found()


class _Stage:
    def __init__(self, flow: ForwardTrace, start: int, stop: int, last: bool) -> None:
        self.flow, self.start, self.stop, self.last = flow, start, stop, last
        given = flow.calls[start - 1].gives if start else {}
        self.received = {node for node, _ in given.values()}
        self.needs = StageRequirements(start=start, stop=stop)
        self._reached: dict[int, tuple[frozenset[str], int | None]] = {}

    def found(self) -> StageRequirements:
        self._arguments()
        self._inner()
        self._reads()
        if self.last:
            for node, _ in self.flow.result.values():
                self._use(node, "the code after the last block")
        return self.needs

    def _arguments(self) -> None:
        for block in range(self.start, self.stop):
            for path, key in self.flow.calls[block].takes.items():
                parameters, missing = self._reach(key[0])
                if missing is None:
                    self.needs.parameters |= parameters
                elif self._is_early(self.flow.nodes[key[0]]):
                    self.needs.carried.setdefault(key, []).append((block, path))
                else:
                    raise self._skip(missing, f"an input of {self.flow.blocks[block].name}")

    def _inner(self) -> None:
        """Add values that blocks use but don't get as arguments: closures, caches, tensors stored by another block."""
        known = {node for block in range(self.start, self.stop) for node, _ in self.flow.calls[block].takes.values()}
        for node in self.flow.nodes:
            if node.block is not None and self.start <= node.block < self.stop:
                for source in node.inputs:
                    if source not in known:
                        self._use(source, f"{node.name} inside {self.flow.blocks[node.block].name}")

    def _reads(self) -> None:
        for read in self.flow.reads:
            if read.block is None and (read.after < self.stop or self.last):
                _, missing = self._reach(read.node)
                if missing is not None:
                    raise DataDependentBranch(
                        f"the forward branches on a value that stage {self.name} does not have: it depends on "
                        f"{self._maker(missing)}.",
                        where=read.where,
                        cause="an `if`, a loop or .item() on a tensor between blocks",
                        hint="move it into a block; or --layout ddp or fsdp",
                    )

    @property
    def name(self) -> str:
        return f"{self.flow.blocks[self.start].name}..{self.flow.blocks[self.stop - 1].name}"

    def _use(self, node: int, user: str) -> None:
        parameters, missing = self._reach(node)
        if missing is not None:
            raise self._skip(missing, user)
        self.needs.parameters |= parameters

    def _skip(self, missing: int, user: str) -> NoChain:
        return NoChain(
            f"a skip connection crosses the cut before {self.flow.blocks[self.start].name}: {user} needs "
            f"{self._maker(missing)}.",
            cause="a value that bypasses the blocks in between, such as a U-Net's skip or collected hidden states",
            hint="--place.stages with both ends on one stage, or pass the value to the later block as an argument",
        )

    def _maker(self, number: int) -> str:
        node = self.flow.nodes[number]
        where = "" if node.block is None else f" made in {self.flow.blocks[node.block].name}"
        drawn = " drawn at random before this stage" if node.draws and node.block is None else ""
        return f"a value ({node.name}){where}{drawn}"

    def _is_early(self, node: Node) -> bool:
        """Return whether a value is made before this stage starts, so that earlier stages have it."""
        return node.after < self.start or (node.after == self.start and node.block is not None)

    def _own(self, node: Node) -> bool:
        return node.block is not None and self.start <= node.block < self.stop

    def _reach(self, root: int) -> tuple[frozenset[str], int | None]:
        """Return the parameters that a value depends on, and the first dependency that this stage lacks, or None."""
        if root not in self._reached:
            parameters: set[str] = set()
            missing = None
            for number, node in self._sources(root):
                if node.parameter is not None:
                    parameters.add(node.parameter)
                elif self._is_foreign(number, node):
                    missing = number
                    break
            self._reached[root] = frozenset(parameters), missing
        return self._reached[root]

    def _sources(self, root: int) -> Iterator[tuple[int, Node]]:
        seen, stack = {root}, [root]
        while stack:
            number = stack.pop()
            node = self.flow.nodes[number]
            if number in self.received:
                continue
            yield number, node
            if not self._is_foreign(number, node) and not self._own(node):
                new = [source for source in node.inputs if source not in seen]
                seen.update(new)
                stack += new

    def _is_foreign(self, number: int, node: Node) -> bool:
        """Return whether a value is made in a block of another stage, or is a random draw before this stage."""
        if number in self.received or self._own(node):
            return False
        return node.block is not None or (node.draws and node.after < self.start)
