"""A model's forward as a list of steps: calls of its own modules, and operations between them.

The graph (read off `torch.export`) says which value goes where; the modules themselves are called, with all that hangs
on them (hooks, modes, sharding). A graph holds for one set of shapes, constants and modes: what Python decided is
decided in it.
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
    """A value of the graph by name, or a constant."""

    name: str = ""
    constant: Any = None

    def of(self, env: Mapping[str, Any]) -> Any:
        """What it is in a run."""
        return env[self.name] if self.name else self.constant


@dataclass(frozen=True, kw_only=True)
class ModuleCall:
    """One call of a module, `number` counting its calls from 0."""

    module: str
    number: int
    takes: tuple[GraphValue, ...]
    gives: tuple[GraphValue, ...]
    form: Any
    draws: bool = False

    @property
    def name(self) -> str:
        """`up.conv`, and `up.conv@1` for its second call."""
        return f"{self.module}@{self.number}" if self.number else self.module

    @property
    def uses(self) -> tuple[str, ...]:
        """Names of values."""
        return tuple(value.name for value in self.takes if value.name)

    @property
    def makes(self) -> tuple[str, ...]:
        """Names of values."""
        return tuple(value.name for value in self.gives if value.name)

    def run(self, env: dict[str, Any], model: nn.Module) -> None:
        """Call the module that stands under this name now."""
        args, kwargs = tree_unflatten([value.of(env) for value in self.takes], self.form)
        leaves, _ = tree_flatten(model.get_submodule(self.module)(*args, **kwargs))
        env.update({value.name: leaf for value, leaf in zip(self.gives, leaves, strict=True) if value.name})


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation between calls."""

    node: Node
    draws: bool = False

    @property
    def name(self) -> str:
        """Of its result."""
        return self.node.name

    @property
    def uses(self) -> tuple[str, ...]:
        """Names of values."""
        return tuple(node.name for node in self.node.all_input_nodes)

    @property
    def makes(self) -> tuple[str, ...]:
        """Names of values."""
        return (self.node.name,)

    def run(self, env: dict[str, Any], model: nn.Module) -> None:
        """Do it."""
        assert callable(self.node.target), "placeholders and attributes are no steps"
        args, kwargs = map_arg((self.node.args, self.node.kwargs), lambda node: env[node.name])
        env[self.node.name] = self.node.target(*args, **kwargs)


Step = ModuleCall | Operation


@dataclass(frozen=True, kw_only=True)
class GraphSource:
    """A value that is there from the beginning: a parameter or buffer by its FQN, or a constant of the graph."""

    kind: InputKind | None
    target: str


@dataclass(frozen=True, kw_only=True)
class Graph:
    """`inputs` are the flat arguments of the model, `values` the nodes by name; what a call hides is not a step.

    `prints`: whether the forward does, which the steps do not.
    """

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    sources: Mapping[str, GraphSource]
    outputs: tuple[GraphValue, ...]
    form: Any
    values: Mapping[str, Node]
    constants: Mapping[str, Any]
    inside: Mapping[str, int] = field(default_factory=dict)
    prints: bool = False

    def given(self, model: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
        """What a run begins with."""
        leaves, _ = tree_flatten((args, kwargs))
        env = {name: leaf for name, leaf in zip(self.inputs, leaves, strict=True) if name}
        for name, source in self.sources.items():
            if source.kind is None:
                env[name] = self.constants[source.target]
            else:
                holder, _, key = source.target.rpartition(".")
                env[name] = getattr(model.get_submodule(holder), key)
        return env

    def output(self, env: Mapping[str, Any]) -> Any:
        """What the forward returns."""
        return tree_unflatten([value.of(env) for value in self.outputs], self.form)


def aliased_arguments(node: Node) -> Iterator[tuple[Node, bool]]:
    """The arguments whose memory a result shares, and whether they are written to."""
    if node.target is operator.getitem:
        yield node.all_input_nodes[0], False
    elif isinstance(node.target, torch._ops.OpOverload):
        for place, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is not None:
                given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
                parts = given if isinstance(given, list | tuple) else [given]
                yield from ((part, argument.alias_info.is_write) for part in parts if isinstance(part, Node))


def silently_written(node: Node) -> Iterator[Node]:
    """Running statistics, of which the operation's schema does not say that they are written to."""
    if node.target in (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default) and node.args[5]:
        yield from (part for part in node.args[3:5] if isinstance(part, Node))
