"""The values of other stages that a stage needs, derived from the traced forward."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.errors import LayoutError
from paceline.parallel.module_access.blocks import NoChain
from paceline.parallel.pipeline.chain.trace_module_calls import ForwardTrace, Node, ValueKey
from paceline.parallel.pipeline.stage_io import TensorPath


class DataDependentBranch(LayoutError):
    """The error for a forward that branches on a value that a stage lacks; other bounds may avoid this error."""


@dataclass(kw_only=True)
class StageRequirements:
    """The parameters that a stage needs outside its blocks, and the skip values sent to it.

    `skip_values` maps each value to the block arguments that receive it, as (number of the block, path).
    """

    start: int
    stop: int
    parameters: set[str] = field(default_factory=set)
    skip_values: dict[ValueKey, list[tuple[int, TensorPath]]] = field(default_factory=dict)


def find_stage_requirements(trace: ForwardTrace, *, start: int, stop: int, is_last: bool) -> StageRequirements:
    """Return the requirements of the stage with blocks `start` to `stop`.

    Raises:
        LayoutError: a value that the stage needs can't be sent from another stage.
    """
    search = _RequirementSearch(trace, start, stop, is_last)
    search.add_block_arguments()
    search.add_values_inside_blocks()
    search.check_python_reads()
    if is_last:
        for node, _ in trace.result.values():
            search.add_value(node, "the code after the last block")
    return search.requirements


class _RequirementSearch:
    """The search for the requirements of one stage; values are indices of the trace's nodes."""

    def __init__(self, trace: ForwardTrace, start: int, stop: int, is_last: bool) -> None:
        self.trace, self.start, self.stop, self.is_last = trace, start, stop, is_last
        received_outputs = trace.calls[start - 1].outputs if start else {}
        self.received_nodes = {node for node, _ in received_outputs.values()}
        self.requirements = StageRequirements(start=start, stop=stop)
        self._dependency_cache: dict[int, tuple[frozenset[str], int | None]] = {}

    def add_block_arguments(self) -> None:
        """Add the values that the stage's blocks get as arguments."""
        for block in range(self.start, self.stop):
            for path, key in self.trace.calls[block].inputs.items():
                parameters, missing = self._dependencies(key[0])
                if missing is None:
                    self.requirements.parameters |= parameters
                elif self._is_made_earlier(self.trace.nodes[key[0]]):
                    self.requirements.skip_values.setdefault(key, []).append((block, path))
                else:
                    raise self._skip_error(missing, f"an input of {self.trace.blocks[block].name}")

    def add_values_inside_blocks(self) -> None:
        """Add values that blocks use but don't get as arguments: closures, caches, tensors stored by another block."""
        arguments = {
            node for block in range(self.start, self.stop) for node, _ in self.trace.calls[block].inputs.values()
        }
        for node in self.trace.nodes:
            if node.block is not None and self.start <= node.block < self.stop:
                for source in node.inputs:
                    if source not in arguments:
                        self.add_value(source, f"{node.name} inside {self.trace.blocks[node.block].name}")

    def check_python_reads(self) -> None:
        """Raise if Python code between the blocks reads a value that the stage does not have."""
        for read in self.trace.python_reads:
            if read.block is None and (read.num_started < self.stop or self.is_last):
                _, missing = self._dependencies(read.node)
                if missing is not None:
                    raise DataDependentBranch(
                        f"the forward branches on a value that stage {self._stage_name} does not have: it depends on "
                        f"{self._description(missing)}.",
                        where=read.where,
                        cause="an `if`, a loop or .item() on a tensor between blocks",
                        hint="move it into a block; or --layout ddp or fsdp",
                    )

    def add_value(self, node: int, user: str) -> None:
        """Add the parameters on which a value depends; `user` says in an error message what needs the value."""
        parameters, missing = self._dependencies(node)
        if missing is not None:
            raise self._skip_error(missing, user)
        self.requirements.parameters |= parameters

    @property
    def _stage_name(self) -> str:
        return f"{self.trace.blocks[self.start].name}..{self.trace.blocks[self.stop - 1].name}"

    def _skip_error(self, missing: int, user: str) -> NoChain:
        return NoChain(
            f"a skip connection crosses the cut before {self.trace.blocks[self.start].name}: {user} needs "
            f"{self._description(missing)}.",
            cause="a value that bypasses the blocks in between, such as a U-Net's skip or collected hidden states",
            hint="--place.stages with both ends on one stage, or pass the value to the later block as an argument",
        )

    def _description(self, index: int) -> str:
        node = self.trace.nodes[index]
        if node.block is not None:
            return f"a value ({node.name}) made in {self.trace.blocks[node.block].name}"
        return f"a value ({node.name}){' drawn at random before this stage' if node.is_random else ''}"

    def _is_made_earlier(self, node: Node) -> bool:
        """Return whether a value is made before this stage starts, so that earlier stages have it."""
        return node.num_started < self.start or (node.num_started == self.start and node.block is not None)

    def _is_made_here(self, node: Node) -> bool:
        return node.block is not None and self.start <= node.block < self.stop

    def _dependencies(self, root: int) -> tuple[frozenset[str], int | None]:
        """Return the parameters that a value depends on, and the first dependency that this stage lacks, or None."""
        if root not in self._dependency_cache:
            parameters: set[str] = set()
            missing = None
            for index, node in self._walk_inputs(root):
                if node.parameter is not None:
                    parameters.add(node.parameter)
                elif self._is_missing(index, node):
                    missing = index
                    break
            self._dependency_cache[root] = frozenset(parameters), missing
        return self._dependency_cache[root]

    def _walk_inputs(self, root: int) -> Iterator[tuple[int, Node]]:
        """Yield a value and its inputs, recursively, up to values that this stage receives, makes itself or lacks."""
        seen, stack = {root}, [root]
        while stack:
            index = stack.pop()
            node = self.trace.nodes[index]
            if index in self.received_nodes:
                continue
            yield index, node
            if not self._is_missing(index, node) and not self._is_made_here(node):
                new_inputs = [source for source in node.inputs if source not in seen]
                seen.update(new_inputs)
                stack += new_inputs

    def _is_missing(self, index: int, node: Node) -> bool:
        """Return whether a value is made in a block of another stage, or is a random draw before this stage."""
        if index in self.received_nodes or self._is_made_here(node):
            return False
        return node.block is not None or (node.is_random and node.num_started < self.start)
