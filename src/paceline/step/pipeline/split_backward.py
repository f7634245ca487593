"""Backward in two halves for zero-bubble schedules: the input gradients first, the weight gradients later.

The first half runs the graph only from the outputs to the stage's inputs. It saves the gradient at each boundary: an
operation on this path that also has weights as inputs. The second half computes the weight gradients from these saved
gradients. A weight that several operations share gets its gradient in the first half, in the autograd engine's order,
so that sums are bit-identical. (Qi et al., "Zero Bubble Pipeline Parallelism", 2023)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from paceline.errors import LayoutError
from paceline.torch_internals.private_api import compute_gradients, run_backward


@dataclass(kw_only=True)
class DeferredWeightGrad:
    """The state that the second half of a backward needs.

    `boundaries` are operations with their weights and saved gradients. `shared_gradients` are the gradients of shared
    weights, from the first half. `full_backward` has the outputs and their gradients, if the stage has no inputs.
    """

    boundaries: list[tuple[Node, list[Tensor], list[Tensor | None]]] = field(default_factory=list)
    shared_gradients: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    full_backward: tuple[list[Tensor], list[Tensor | None]] | None = None


def backward_input(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], DeferredWeightGrad]:
    """Return the gradients of `inputs`, and the state from which `backward_weight` computes the weight gradients."""
    if not inputs:
        return [], DeferredWeightGrad(full_backward=(list(outputs), list(gradients)))
    boundaries, shared_weights = _find_boundaries([get_gradient_edge(output).node for output in outputs], inputs)
    deferred = DeferredWeightGrad()
    saved_gradients: dict[Node, tuple[Tensor | None, ...]] = {}
    handles = [node.register_prehook(_gradient_saver(node, saved_gradients)) for node, _ in boundaries]
    try:
        gradients_found = compute_gradients(outputs, [*inputs, *shared_weights], gradients, retain_graph=True)
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
    deferred.shared_gradients = [
        (weight, gradient)
        for weight, gradient in zip(shared_weights, gradients_found[len(inputs) :], strict=True)
        if gradient is not None
    ]
    deferred.boundaries = [
        (node, weights, list(saved_gradients[node])) for node, weights in boundaries if node in saved_gradients
    ]
    return list(gradients_found[: len(inputs)]), deferred


def backward_weight(deferred: DeferredWeightGrad) -> None:
    """Add the weight gradients to `.grad`; parameter hooks run as in any backward."""
    if deferred.full_backward is not None:
        run_backward(*deferred.full_backward)
        return
    weight_gradients = list(deferred.shared_gradients)
    for node, weights, output_gradients in deferred.boundaries:
        edges = [GradientEdge(node, index) for index, gradient in enumerate(output_gradients) if gradient is not None]
        gradients = compute_gradients(
            edges, weights, [gradient for gradient in output_gradients if gradient is not None]
        )
        weight_gradients += [(w, g) for w, g in zip(weights, gradients, strict=True) if g is not None]
    deferred.boundaries.clear()
    if weight_gradients:
        run_backward([weight for weight, _ in weight_gradients], [gradient for _, gradient in weight_gradients])


def _gradient_saver(node: Node, saved_gradients: dict[Node, tuple[Tensor | None, ...]]) -> Any:
    def save(gradients: tuple[Tensor | None, ...]) -> None:
        saved_gradients[node] = gradients

    return save


def _find_boundaries(
    roots: Sequence[Node], inputs: Sequence[Tensor]
) -> tuple[list[tuple[Node, list[Tensor]]], list[Tensor]]:
    """Return the boundaries and the shared weights. Each boundary comes with the weights that only it leads to."""
    order = _reverse_topological_order(roots)
    on_path = {get_gradient_edge(tensor).node for tensor in inputs}
    input_nodes = {get_gradient_edge(tensor).node for tensor in inputs}
    weights: dict[Node, dict[int, Tensor]] = {}
    for node in order:
        successors = [successor for successor, _ in node.next_functions if successor is not None]
        if any(successor in on_path for successor in successors):
            on_path.add(node)
        if node not in on_path:
            variable = getattr(node, "variable", None)
            node_weights = {} if variable is None else {id(variable): variable}
            for successor in successors:
                node_weights |= weights[successor]
            weights[node] = node_weights
    weights_off_path = {
        node: _merge([weights[child] for child, _ in node.next_functions if child is not None and child not in on_path])
        for node in order
        if node in on_path and node not in input_nodes
    }
    num_uses: dict[int, int] = {}
    tensors: dict[int, Tensor] = {}
    weights_of_off_path_roots = [weights[root] for root in roots if root not in on_path] * 2  # so they count as shared
    for node_weights in [*weights_off_path.values(), *weights_of_off_path_roots]:
        for key, tensor in node_weights.items():
            num_uses[key] = num_uses.get(key, 0) + 1
            tensors[key] = tensor
    exclusive = [
        (node, [tensor for key, tensor in node_weights.items() if num_uses[key] == 1])
        for node, node_weights in weights_off_path.items()
    ]
    boundaries = [(node, node_tensors) for node, node_tensors in exclusive if node_tensors]
    return boundaries, [tensors[key] for key, count in num_uses.items() if count > 1]


def _merge(parts: Sequence[dict[int, Tensor]]) -> dict[int, Tensor]:
    merged: dict[int, Tensor] = {}
    for part in parts:
        merged |= part
    return merged


def _reverse_topological_order(roots: Sequence[Node]) -> list[Node]:
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
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    return order
