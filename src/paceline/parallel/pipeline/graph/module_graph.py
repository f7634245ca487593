"""A model's forward as a list of steps: calls of its own modules, and operations between them.

The graph from `torch.export` defines the data flow; a step calls the module itself, with its hooks, mode and sharding.
A graph is valid for one set of shapes, constants and modes, because it contains one path through the Python code.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg

from paceline.torch_internals.private_api import tree_flatten, tree_unflatten


@dataclass(frozen=True, kw_only=True)
class GraphValue:
    """A value of the graph, referenced by name, or a constant."""

    name: str = ""
    constant: Any = None

    def resolve(self, env: Mapping[str, Any]) -> Any:
        """Return the constant, or the value of this name in `env`, which maps the names in a run to their values."""
        return env[self.name] if self.name else self.constant


@dataclass(frozen=True, kw_only=True)
class ModuleCall:
    """A call of a module. `call_index` counts the calls of this module; `in_spec` is the structure of its arguments."""

    module_name: str
    call_index: int
    inputs: tuple[GraphValue, ...]
    outputs: tuple[GraphValue, ...]
    in_spec: Any
    draws_random: bool = False

    @property
    def name(self) -> str:
        """Return the call's name: `up.conv`, and `up.conv@1` for the second call."""
        return f"{self.module_name}@{self.call_index}" if self.call_index else self.module_name

    @property
    def input_names(self) -> tuple[str, ...]:
        """Return the names of the call's inputs."""
        return tuple(value.name for value in self.inputs if value.name)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Return the names of the call's outputs."""
        return tuple(value.name for value in self.outputs if value.name)

    def run(self, env: dict[str, Any], model: nn.Module) -> None:
        """Call the model's current module of this name, and store its outputs in `env`."""
        args, kwargs = tree_unflatten([value.resolve(env) for value in self.inputs], self.in_spec)
        leaves, _ = tree_flatten(model.get_submodule(self.module_name)(*args, **kwargs))
        env.update({value.name: leaf for value, leaf in zip(self.outputs, leaves, strict=True) if value.name})


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation between module calls."""

    node: Node
    draws_random: bool = False

    @property
    def name(self) -> str:
        """Return the name of the operation's result."""
        return self.node.name

    @property
    def input_names(self) -> tuple[str, ...]:
        """Return the names of the operation's inputs."""
        return tuple(node.name for node in self.node.all_input_nodes)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Return the name of the operation's result, as a tuple."""
        return (self.node.name,)

    def run(self, env: dict[str, Any], model: nn.Module) -> None:
        """Run the operation and store its result in `env`."""
        assert callable(self.node.target), "placeholders and attributes are not steps"
        args, kwargs = map_arg((self.node.args, self.node.kwargs), lambda node: env[node.name])
        env[self.node.name] = self.node.target(*args, **kwargs)


Step = ModuleCall | Operation


@dataclass(frozen=True, kw_only=True)
class GraphSource:
    """The source of a value that exists before the first step: a parameter or buffer (FQN), or a graph constant."""

    kind: InputKind | None
    target: str


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The graph of a forward.

    `input_names` are the names of the model's flattened arguments ("" for constants). `nodes` are all nodes by name.
    Operations inside a module call are not steps; `enclosing_steps` maps their names to the index of the call's step.
    `has_print_calls`: whether the forward prints, which the steps don't repeat.
    """

    steps: tuple[Step, ...]
    input_names: tuple[str, ...]
    sources: Mapping[str, GraphSource]
    outputs: tuple[GraphValue, ...]
    out_spec: Any
    nodes: Mapping[str, Node]
    constants: Mapping[str, Any]
    enclosing_steps: Mapping[str, int] = field(default_factory=dict)
    has_print_calls: bool = False

    def initial_env(self, model: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
        """Return the values that exist before the first step of a run, by name."""
        leaves, _ = tree_flatten((args, kwargs))
        env = {name: leaf for name, leaf in zip(self.input_names, leaves, strict=True) if name}
        for name, source in self.sources.items():
            if source.kind is None:
                env[name] = self.constants[source.target]
            else:
                module_name, _, attribute = source.target.rpartition(".")
                env[name] = getattr(model.get_submodule(module_name), attribute)
        return env

    def build_output(self, env: Mapping[str, Any]) -> Any:
        """Return the forward's output from the values of a run."""
        return tree_unflatten([value.resolve(env) for value in self.outputs], self.out_spec)


def aliased_arguments(node: Node) -> Iterator[tuple[Node, bool]]:
    """Yield each argument whose memory a result shares, and whether the operation writes to this argument."""
    if node.target is operator.getitem:
        yield node.all_input_nodes[0], False
    elif isinstance(node.target, torch._ops.OpOverload):
        for index, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is not None:
                value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
                values = value if isinstance(value, list | tuple) else [value]
                yield from ((value, argument.alias_info.is_write) for value in values if isinstance(value, Node))


def updated_running_stats(node: Node) -> Iterator[Node]:
    """Yield the running statistics that an operation updates, although its schema does not declare the write."""
    if node.target in (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default) and node.args[5]:
        yield from (stats for stats in node.args[3:5] if isinstance(stats, Node))
