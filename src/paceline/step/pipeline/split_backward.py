"""Backward in two halves for zero-bubble schedules: the input gradients first, the weight gradients later.

The first half runs the graph only from the outputs to the stage's inputs. It saves the gradient at each boundary: an
operation on this path that also has weights as inputs. The second half computes the weight gradients from the saved
ones. A weight that several operations share gets its gradient in the first half, in the autograd engine's order, so
that sums are bit-identical. (Qi et al., "Zero Bubble Pipeline Parallelism", 2023)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from paceline.errors import LayoutError
from paceline.torch_internals.private_api import add_gradients, gradients_of


@dataclass(kw_only=True)
class DeferredWeightGrad:
    """The state that the second half needs.

    `boundaries` are operations with their weights and saved gradients. `shared_gradients` are the gradients of shared
    weights, from the first half. `full_backward` has the outputs and their gradients, if the stage has no inputs.
    """

    borders: list[tuple[Node, list[Tensor], list[Tensor | None]]] = field(default_factory=list)
    early: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    whole: tuple[list[Tensor], list[Tensor | None]] | None = None


def backward_input(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], DeferredWeightGrad]:
    """Return the gradients of `inputs`, and what `backward_weight` needs to compute the weight gradients."""
    if not inputs:
        return [], DeferredWeightGrad(whole=(list(outputs), list(gradients)))
    borders, shared = _borders([get_gradient_edge(output).node for output in outputs], inputs)
    rest = DeferredWeightGrad()
    kept: dict[Node, tuple[Tensor | None, ...]] = {}
    handles = [node.register_prehook(_keeper(node, kept)) for node, _ in borders]
    try:
        found = gradients_of(outputs, [*inputs, *shared], gradients, retain_graph=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise LayoutError(
            "the model checkpoints its activations with use_reentrant=True, whose backward can't be split in halves.",
            cause="zero-bubble schedules (zb_h1, zb_interleaved, zbv) do a stage's backward in two halves",
            hint="torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or --layout pp,schedule=1f1b",
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    rest.early = [
        (weight, gradient)
        for weight, gradient in zip(shared, found[len(inputs) :], strict=True)
        if gradient is not None
    ]
    rest.borders = [(node, weights, list(kept[node])) for node, weights in borders if node in kept]
    return list(found[: len(inputs)]), rest


def backward_weight(rest: DeferredWeightGrad) -> None:
    """Add the weight gradients to `.grad`; parameter hooks run as in any backward."""
    if rest.whole is not None:
        add_gradients(*rest.whole)
        return
    found = list(rest.early)
    for node, weights, arrived in rest.borders:
        edges = [GradientEdge(node, place) for place, gradient in enumerate(arrived) if gradient is not None]
        gradients = gradients_of(edges, weights, [gradient for gradient in arrived if gradient is not None])
        found += [(w, g) for w, g in zip(weights, gradients, strict=True) if g is not None]
    rest.borders.clear()
    if found:
        add_gradients([weight for weight, _ in found], [gradient for _, gradient in found])


def _keeper(node: Node, kept: dict[Node, tuple[Tensor | None, ...]]) -> Any:
    def keep(gradients: tuple[Tensor | None, ...]) -> None:
        kept[node] = gradients

    return keep


def _borders(roots: Sequence[Node], inputs: Sequence[Tensor]) -> tuple[list[tuple[Node, list[Tensor]]], list[Tensor]]:
    """Return the boundaries, each with the weights that only it leads to, and the weights that several lead to."""
    order = _backwards(roots)
    chain = {get_gradient_edge(tensor).node for tensor in inputs}
    own = {get_gradient_edge(tensor).node for tensor in inputs}
    weights: dict[Node, dict[int, Tensor]] = {}
    for node in order:
        following = [after for after, _ in node.next_functions if after is not None]
        if any(after in chain for after in following):
            chain.add(node)
        if node not in chain:
            variable = getattr(node, "variable", None)
            mine = {} if variable is None else {id(variable): variable}
            for after in following:
                mine |= weights[after]
            weights[node] = mine
    beside = {
        node: _merged([weights[after] for after, _ in node.next_functions if after is not None and after not in chain])
        for node in order
        if node in chain and node not in own
    }
    uses: dict[int, int] = {}
    tensors: dict[int, Tensor] = {}
    loose = [weights[root] for root in roots if root not in chain]
    for each in [*beside.values(), *loose, *loose]:  # roots that depend on no input count as shared
        for key, tensor in each.items():
            uses[key] = uses.get(key, 0) + 1
            tensors[key] = tensor
    alone = [(node, [t for key, t in mine.items() if uses[key] == 1]) for node, mine in beside.items()]
    return [(node, mine) for node, mine in alone if mine], [tensors[key] for key, used in uses.items() if used > 1]


def _merged(parts: Sequence[dict[int, Tensor]]) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    for part in parts:
        found |= part
    return found


def _backwards(roots: Sequence[Node]) -> list[Node]:
    """Return all nodes of the autograd graph, each after its `next_functions`."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(after, False) for after, _ in node.next_functions if after is not None and after not in seen]
    return order
