"""A trace of one forward: the dependencies of each value, and the block that made it. The model is not changed.

Each storage is a node; an operation that writes to a storage creates a new node. A node records its inputs, the block
in which it was made (None between blocks) and how many blocks had started by then.
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
from paceline.parallel.pipeline.stage_io import TensorPath, tensors_in
from paceline.torch_internals.dispatch_modes import OpObserver, written_tensors
from paceline.torch_internals.private_api import CallInterceptor, running_autograd_function
from paceline.torch_internals.rng import python_rng_states, random_blocks

_TRACING_FILES = (
    "parallel/pipeline/chain/trace_module_calls.py",
    "torch_internals/private_api.py",
    "torch_internals/dispatch_modes.py",
    "initialization/record_mode.py",
    "initialization/meta_forward.py",
)

ViewGeometry = tuple[tuple[int, ...], tuple[int, ...], int, str]
"""The shape, strides, storage offset and dtype, which distinguish the views of one storage."""
ValueKey = tuple[int, ViewGeometry]
"""A tensor of the trace: the index of its node, and its view of the node's storage."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A value in the trace: the result of an operation, a parameter, or an input of the forward.

    `inputs` are the indices of other nodes, `block` is the block in which it was made (None between blocks), and
    `num_started` the number of blocks that had started by then. `is_random`: whether it was drawn at random.
    """

    inputs: tuple[int, ...] = ()
    block: int | None = None
    num_started: int = 0
    name: str = ""
    parameter: str | None = None
    is_random: bool = False


@dataclass(kw_only=True)
class BlockCall:
    """A call of a block: its input and output tensors by path, the shapes and dtypes of the inputs, and the output."""

    inputs: dict[TensorPath, ValueKey]
    outputs: dict[TensorPath, ValueKey] = field(default_factory=dict)
    input_types: dict[TensorPath, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    output_value: Any = None


@dataclass(frozen=True, kw_only=True)
class PythonRead:
    """A value that Python read (`if x > 0`, `x.item()`), and the line that read it."""

    node: int
    block: int | None
    num_started: int
    where: str


@dataclass(kw_only=True)
class ForwardTrace:
    """The result of `trace_forward`."""

    blocks: tuple[Block, ...]
    nodes: list[Node] = field(default_factory=list)
    calls: list[BlockCall] = field(default_factory=list)
    python_reads: list[PythonRead] = field(default_factory=list)
    random_events: list[tuple[int, bool]] = field(default_factory=list)
    """Draws and starts of random streams, in order, as (position, whether it is a draw).

    A position is `2 * block + 1` inside a block and `2 * num_started` between blocks.
    """
    result: dict[TensorPath, ValueKey] = field(default_factory=dict)
    overwritten_nodes: set[int] = field(default_factory=set)
    """The nodes that a later operation overwrites."""
    counter_attribute: str = ""
    """An attribute that each forward changes before the first block, or an empty string."""
    enclosed_block: tuple[str, str] | None = None
    """The first block that an autograd function calls, as (block, function)."""
    buffer_uses: dict[str, set[int | None]] = field(default_factory=dict)
    """For each buffer, the blocks whose operations use its memory; None stands for code between blocks."""
    buffer_writes: dict[str, set[int | None]] = field(default_factory=dict)
    """For each buffer, the blocks whose operations overwrite its memory; None stands for code between blocks."""


def trace_forward(model: nn.Module, *, blocks: Sequence[Block], call: Callable[[], Any]) -> ForwardTrace:
    """Trace `call`, a forward of the model on one example, in training mode, without gradients or side effects.

    Raises:
        LayoutError: a block is called twice, inside another block, or never.
    """
    with side_effect_free(model), torch.no_grad():
        model.train()
        recorder = _TraceRecorder(model, blocks)
        interceptors = [CallInterceptor(block.module, recorder.block_handler(block)) for block in blocks]
        try:
            with OpObserver(recorder.record_operation):
                result = call()
                recorder.record_result(result)
        finally:
            for interceptor in reversed(interceptors):
                interceptor.undo()
        recorder.find_counter(call)
    return recorder.trace


class _TraceRecorder:
    """The trace of a running forward, with the node of each storage."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        self.trace = ForwardTrace(blocks=())
        self._blocks = blocks
        self._started_blocks: list[Block] = []
        self._random_block_ids = {id(block) for block in random_blocks(model)}
        self._current_block: int | None = None
        self._shared_modules = {
            name: module for name, module in model.named_modules() if _runs_on_every_stage(module, blocks)
        }
        self._states: list[dict[str, Any]] = [plain_state(self._shared_modules)]  # at the start and at the first block
        self._node_by_storage = WeakIdKeyDictionary()
        for name, parameter in model.named_parameters():
            self._node_by_storage[parameter.untyped_storage()] = self._add_node(Node(parameter=name, name=name))
        self._buffers_by_storage = WeakIdKeyDictionary()
        for name, buffer in model.named_buffers():
            self._buffers_by_storage.setdefault(buffer.untyped_storage(), []).append(name)

    def block_handler(self, block: Block) -> Callable[..., Any]:
        """Return the handler that records a call of a block."""

        def handle_call(original_call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._start_block(block)
            arguments = {"args": args, "kwargs": kwargs}
            input_types = {path: (tensor.shape, tensor.dtype) for path, tensor in tensors_in(arguments)}
            block_call = BlockCall(inputs=self._value_keys(arguments), input_types=input_types)
            self.trace.calls.append(block_call)
            old_states = python_rng_states()
            output = original_call(*args, **kwargs)
            _refuse_python_draws(block, old_states)
            block_call.output_value, block_call.outputs = output, self._value_keys(output)
            self._current_block = None
            return output

        return handle_call

    def _start_block(self, block: Block) -> None:
        if self._current_block is not None or block in self._started_blocks:
            inside = "" if self._current_block is None else f" inside {self._started_blocks[self._current_block].name}"
            raise NoChain(
                f"the block {block.name} is called{inside or ' twice'} in one forward, so the blocks are no chain.",
                cause="layers that share weights because they are one module, or a loop over all of them",
                hint="list blocks that are each called once",
            )
        if not self._started_blocks:
            self._states.append(plain_state(self._shared_modules))
        function = running_autograd_function()
        if function is not None and self.trace.enclosed_block is None:
            self.trace.enclosed_block = block.name, function.__name__
        self._current_block = len(self._started_blocks)
        self._started_blocks.append(block)
        if id(block.module) in self._random_block_ids:
            self.trace.random_events.append((2 * self._current_block + 1, False))

    def record_operation(self, operation: Any, args: Any, kwargs: Any, result: Any, is_random: bool) -> None:
        """Record an operation: its inputs, results, in-place writes and random draws."""
        input_tensors = [tensor for _, tensor in tensors_in([args, kwargs])]
        inputs = tuple(dict.fromkeys(map(self._node_index, input_tensors)))
        block, num_started = self._current_block, len(self._started_blocks)
        if operation is torch.ops.aten._local_scalar_dense.default:
            read = PythonRead(node=inputs[0], block=block, num_started=num_started, where=_reading_line())
            self.trace.python_reads.append(read)
            return
        written = written_tensors(operation, args, kwargs)
        self._record_buffers(self.trace.buffer_uses, input_tensors)
        self._record_buffers(self.trace.buffer_writes, written)
        new_tensors = [t for _, t in tensors_in(result) if t.untyped_storage() not in self._node_by_storage]
        if not new_tensors and not written:
            return
        if is_random:
            self.trace.random_events.append((2 * num_started if block is None else 2 * block + 1, True))
        name = operation.overloadpacket.__name__
        index = self._add_node(
            Node(inputs=inputs, block=block, num_started=num_started, name=name, is_random=is_random)
        )
        self.trace.overwritten_nodes |= {self._node_index(tensor) for tensor in written}
        for tensor in [*new_tensors, *written]:
            self._node_by_storage[tensor.untyped_storage()] = index

    def record_result(self, result: Any) -> None:
        """Record the forward's result, and check that every block was called."""
        self.trace.result = self._value_keys(result)
        missed = [block.name for block in self._blocks if block not in self._started_blocks]
        if missed:
            raise LayoutError(
                f"the forward does not call the block {missed[0]}.",
                cause="a branch that skips layers (stochastic depth, early exit), a layer that another forward uses, "
                "a copy of the block that is called instead, or block.forward(x) instead of block(x)",
                hint="list the blocks that every forward calls, in their order: --place.blocks layers.0,layers.1",
            )
        self.trace.blocks = tuple(
            Block(index=index, name=block.name, module=block.module) for index, block in enumerate(self._started_blocks)
        )

    def find_counter(self, call: Callable[[], Any]) -> None:
        """Find an attribute that each forward changes outside the blocks, by comparing the states after two forwards.

        Raises:
            LayoutError: the attribute changes after the first block, in code that not every stage runs.
        """
        start_state, first_block_state = self._states
        end_state = plain_state(self._shared_modules)
        changed = [name for name, value in end_state.items() if start_state.get(name, value) != value]
        if changed:
            call()
            second_state = plain_state(self._shared_modules)
            for name in changed:
                changes_again = second_state.get(name) != end_state[name]
                if changes_again and first_block_state.get(name) != end_state[name]:
                    raise NoChain(
                        f"the forward changes self.{name} after its first block, but not every stage runs that code.",
                        cause="a counter, a flag or a list that a later forward reads",
                        hint="change it before the first block; or --layout ddp or fsdp",
                    )
                if changes_again:
                    self.trace.counter_attribute = name

    def _record_buffers(self, blocks_by_buffer: dict[str, set[int | None]], tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            for name in self._buffers_by_storage.get(tensor.untyped_storage(), ()):
                blocks_by_buffer.setdefault(name, set()).add(self._current_block)

    def _value_keys(self, value: Any) -> dict[TensorPath, ValueKey]:
        return {path: (self._node_index(tensor), _view_geometry(tensor)) for path, tensor in tensors_in(value)}

    def _node_index(self, tensor: Tensor) -> int:
        """Return the index of the node of a tensor's storage; an unknown storage is a new input of the forward."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError as error:
            raise LayoutError(
                "the forward calls its blocks inside a torch.func transform, which hides the values passed from one to "
                "the next.",
                cause="torch.func.vmap, grad or jvp around a block",
                hint="move the transform inside a block, or use a batch dimension instead; or --layout ddp or fsdp",
            ) from error
        if storage not in self._node_by_storage:
            self._node_by_storage[storage] = self._add_node(Node(name="input"))
        return int(self._node_by_storage[storage])

    def _add_node(self, node: Node) -> int:
        self.trace.nodes.append(node)
        return len(self.trace.nodes) - 1


def _runs_on_every_stage(module: nn.Module, blocks: Sequence[Block]) -> bool:
    """Return whether a module's forward runs on every stage.

    Such a module is outside the blocks, and either contains a block or has no parameters.
    """
    in_blocks = {id(part) for block in blocks for part in block.module.modules()}
    submodules = {id(part) for part in module.modules()}
    has_no_parameters = next(module.parameters(), None) is None
    return id(module) not in in_blocks and (bool(submodules & in_blocks) or has_no_parameters)


def _refuse_python_draws(block: Block, old_states: Mapping[str, Any]) -> None:
    name = next((name for name, state in python_rng_states().items() if state != old_states[name]), None)
    if name is not None:
        raise LayoutError(
            f"the block {block.name} draws from {name}, and a stage would draw different numbers than one process, "
            "because it does not run the earlier blocks.",
            cause="stochastic depth or augmentation by Python's own generators",
            hint="draw with torch: torch.rand(()).item() instead of random.random(); or --layout ddp or fsdp",
        )


def _view_geometry(tensor: Tensor) -> ViewGeometry:
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), str(tensor.dtype)


def _reading_line() -> str:
    """Return the innermost line on the stack that is not in torch or in Paceline's tracing files."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and not file.endswith(_TRACING_FILES):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
