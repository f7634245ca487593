"""A trace of one forward: the dependencies of each value, and the block that made it. The model is not changed.

Each storage is a node; an operation that writes to a storage creates a new node. A node records its inputs, the block
in which it was made (None between blocks) and how many blocks had begun by then.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from paceline.errors import LayoutError
from paceline.parallel.module_access.blocks import Block, NoChain
from paceline.parallel.module_access.user_call_isolation import plain_state, side_effect_free
from paceline.parallel.pipeline.stage_io import Path, tensors_in
from paceline.torch_internals.dispatch_modes import OpObserver, written_tensors
from paceline.torch_internals.private_api import CallInterceptor, running_autograd_function
from paceline.torch_internals.rng import python_rng_states, random_blocks

OUR_FILES = (
    "parallel/pipeline/chain/trace_module_calls.py",
    "torch_internals/private_api.py",
    "torch_internals/dispatch_modes.py",
    "initialization/record_mode.py",
    "initialization/meta_forward.py",
)

Geometry = tuple[tuple[int, ...], tuple[int, ...], int, str]
Key = tuple[int, Geometry]


@dataclass(frozen=True, kw_only=True)
class Node:
    """A value in the trace: the result of an operation, a parameter, or an input of the forward."""

    inputs: tuple[int, ...] = ()
    block: int | None = None
    after: int = 0
    name: str = ""
    parameter: str | None = None
    draws: bool = False


@dataclass(kw_only=True)
class BlockCall:
    """A call of a block: its input and output tensors by path, and the shapes and dtypes of the inputs."""

    takes: dict[Path, Key]
    gives: dict[Path, Key] = field(default_factory=dict)
    given: dict[Path, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    output: Any = None


@dataclass(frozen=True, kw_only=True)
class PythonRead:
    """A value that Python read (`if x > 0`, `x.item()`), and the line that read it."""

    node: int
    block: int | None
    after: int
    where: str


@dataclass(kw_only=True)
class ForwardTrace:
    """The result of `trace_forward`.

    `events` are draws and starts of random streams, in order, as (position, whether it is a draw). A position is
    `2 * block + 1` inside a block and `2 * after` between blocks. `changed` are the nodes that a later
    operation overwrites. `counts` is an attribute that each forward changes before the first block.
    `used` and `wrote` map each buffer to the blocks whose operations read or overwrite its memory (None
    between blocks). `enclosed` is the first block that an autograd function calls, with the function's name.
    """

    blocks: tuple[Block, ...]
    nodes: list[Node] = field(default_factory=list)
    calls: list[BlockCall] = field(default_factory=list)
    reads: list[PythonRead] = field(default_factory=list)
    events: list[tuple[int, bool]] = field(default_factory=list)
    result: dict[Path, Key] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    counts: str = ""
    enclosed: tuple[str, str] | None = None
    used: dict[str, set[int | None]] = field(default_factory=dict)
    wrote: dict[str, set[int | None]] = field(default_factory=dict)


def trace_forward(model: nn.Module, *, blocks: Sequence[Block], call: Callable[[], Any]) -> ForwardTrace:
    """Trace `call`, a forward of the model on one example, in training mode, without gradients or side effects.

    Raises:
        LayoutError: a block is called twice, inside another block, or never.
    """
    with side_effect_free(model), torch.no_grad():
        model.train()
        watcher = _Watcher(model, blocks)
        gates = [CallInterceptor(block.module, watcher.gate(block)) for block in blocks]
        try:
            with OpObserver(watcher.see):
                result = call()
                watcher.finish(result)
        finally:
            for gate in reversed(gates):
                gate.undo()
        watcher.count(call)
    return watcher.flow


class _Watcher:
    def __init__(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        self.flow = ForwardTrace(blocks=())
        self._blocks = blocks
        self._order: list[Block] = []
        self._seeding = {id(block) for block in random_blocks(model)}
        self._inside: int | None = None
        self._modules = {name: module for name, module in model.named_modules() if is_around(module, blocks)}
        self._plain: list[dict[str, Any]] = [plain_state(self._modules)]
        self._node_of = WeakIdKeyDictionary()
        for name, parameter in model.named_parameters():
            self._node_of[parameter.untyped_storage()] = self._add(Node(parameter=name, name=name))
        self._buffers = WeakIdKeyDictionary()
        for name, buffer in model.named_buffers():
            self._buffers.setdefault(buffer.untyped_storage(), []).append(name)

    def gate(self, block: Block) -> Callable[..., Any]:
        """Return the handler that records a call of a block."""

        def answer(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._begin(block)
            value = {"args": args, "kwargs": kwargs}
            given = {path: (tensor.shape, tensor.dtype) for path, tensor in tensors_in(value)}
            seen = BlockCall(takes=self._keys(value), given=given)
            self.flow.calls.append(seen)
            before = python_rng_states()
            output = call(*args, **kwargs)
            _refuse_drawn(block, before)
            seen.output, seen.gives = output, self._keys(output)
            self._inside = None
            return output

        return answer

    def _begin(self, block: Block) -> None:
        if self._inside is not None or block in self._order:
            inside = "" if self._inside is None else f" inside {self._order[self._inside].name}"
            raise NoChain(
                f"the block {block.name} is called{inside or ' twice'} in one forward, so the blocks are no chain.",
                cause="layers that share weights because they are one module, or a loop over all of them",
                hint="list blocks that are each called once",
            )
        if not self._order:
            self._plain.append(plain_state(self._modules))
        function = running_autograd_function()
        if function is not None and self.flow.enclosed is None:
            self.flow.enclosed = block.name, function.__name__
        self._inside = len(self._order)
        self._order.append(block)
        if id(block.module) in self._seeding:
            self.flow.events.append((2 * self._inside + 1, False))

    def see(self, operation: Any, args: Any, kwargs: Any, result: Any, drew: bool) -> None:
        """Record an operation: its inputs, results, in-place writes and random draws."""
        inputs = tuple(dict.fromkeys(self._node(t) for _, t in tensors_in([args, kwargs])))
        if operation is torch.ops.aten._local_scalar_dense.default:
            read = PythonRead(node=inputs[0], block=self._inside, after=len(self._order), where=_line())
            self.flow.reads.append(read)
            return
        changed = written_tensors(operation, args, kwargs)
        self._note(self.flow.used, [tensor for _, tensor in tensors_in([args, kwargs])])
        self._note(self.flow.wrote, changed)
        made = [t for _, t in tensors_in(result) if t.untyped_storage() not in self._node_of]
        if not made and not changed:
            return
        node = Node(
            inputs=inputs,
            block=self._inside,
            after=len(self._order),
            name=operation.overloadpacket.__name__,
            draws=drew,
        )
        if node.draws:
            after = len(self._order)
            self.flow.events.append((2 * after if self._inside is None else 2 * self._inside + 1, True))
        number = self._add(node)
        self.flow.changed |= {self._node(tensor) for tensor in changed}
        for tensor in [*made, *changed]:
            self._node_of[tensor.untyped_storage()] = number

    def finish(self, result: Any) -> None:
        """Record the forward's result, and check that every block was called."""
        self.flow.result = self._keys(result)
        missed = [block.name for block in self._blocks if block not in self._order]
        if missed:
            raise LayoutError(
                f"the forward does not call the block {missed[0]}.",
                cause="a branch that skips layers (stochastic depth, early exit), a layer that another forward uses, "
                "a copy of the block that is called instead, or block.forward(x) instead of block(x)",
                hint="list the blocks that every forward calls, in their order: --place.blocks layers.0,layers.1",
            )
        self.flow.blocks = tuple(
            Block(index=index, name=block.name, module=block.module) for index, block in enumerate(self._order)
        )

    def count(self, call: Callable[[], Any]) -> None:
        """Find an attribute that each forward changes outside the blocks, by comparing the states after two forwards.

        Raises:
            LayoutError: the attribute changes after the first block, in code that not every stage runs.
        """
        before, first = self._plain
        after = plain_state(self._modules)
        changed = [name for name, value in after.items() if before.get(name, value) != value]
        if changed:
            call()
            again = plain_state(self._modules)
            for name in changed:
                if again.get(name) != after[name] and first.get(name) != after[name]:
                    raise NoChain(
                        f"the forward changes self.{name} after its first block, but not every stage runs that code.",
                        cause="a counter, a flag or a list that a later forward reads",
                        hint="change it before the first block; or --layout ddp or fsdp",
                    )
                if again.get(name) != after[name]:
                    self.flow.counts = name

    def _note(self, found: dict[str, set[int | None]], tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            for name in self._buffers.get(tensor.untyped_storage(), ()):
                found.setdefault(name, set()).add(self._inside)

    def _keys(self, value: Any) -> dict[Path, Key]:
        return {path: (self._node(tensor), view_geometry(tensor)) for path, tensor in tensors_in(value)}

    def _node(self, tensor: Tensor) -> int:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError as error:
            raise LayoutError(
                "the forward calls its blocks inside a torch.func transform, which hides the values passed from one to "
                "the next.",
                cause="torch.func.vmap, grad or jvp around a block",
                hint="move the transform inside a block, or use a batch dimension instead; or --layout ddp or fsdp",
            ) from error
        if storage not in self._node_of:
            self._node_of[storage] = self._add(Node(name="input", after=0))
        return int(self._node_of[storage])

    def _add(self, node: Node) -> int:
        self.flow.nodes.append(node)
        return len(self.flow.nodes) - 1


def is_around(module: nn.Module, blocks: Sequence[Block]) -> bool:
    """Return whether a module's forward runs on every stage.

    Such a module is outside the blocks, and either contains a block or has no parameters.
    """
    inside = {id(part) for block in blocks for part in block.module.modules()}
    parts = {id(part) for part in module.modules()}
    return id(module) not in inside and (bool(parts & inside) or next(module.parameters(), None) is None)


def _refuse_drawn(block: Block, before: Mapping[str, Any]) -> None:
    name = next((name for name, state in python_rng_states().items() if state != before[name]), None)
    if name is not None:
        raise LayoutError(
            f"the block {block.name} draws from {name}, and a stage would draw different numbers than one process: "
            "it does not run the earlier blocks.",
            cause="stochastic depth or augmentation by Python's own generators",
            hint="draw with torch: torch.rand(()).item() instead of random.random(); or --layout ddp or fsdp",
        )


def view_geometry(tensor: Tensor) -> Geometry:
    """Return the properties that distinguish views of one storage."""
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), str(tensor.dtype)


def _line() -> str:
    """Return the innermost line on the stack that is not in torch or in Paceline's tracing files."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and not file.endswith(OUR_FILES):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
