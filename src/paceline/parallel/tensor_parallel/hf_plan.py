"""Read the tensor plan of a Hugging Face model from its `_tp_plan` and `base_model_tp_plan`."""

from typing import Any

from torch import nn

from paceline.errors import LayoutError
from paceline.parallel.tensor_parallel.tensor_plan import ParameterRole, TensorPlan

STYLES = {
    "colwise": ParameterRole(kind="column"),
    "colwise_rep": ParameterRole(kind="column"),
    "colwise_gather_output": ParameterRole(kind="column"),
    "rowwise": ParameterRole(kind="row"),
    "rowwise_rep": ParameterRole(kind="row"),
    "rowwise_split_input": ParameterRole(kind="row"),
    "embedding_rowwise": ParameterRole(kind="embedding"),
    "embedding_colwise": ParameterRole(kind="column", dim=1),
    "packed_colwise": ParameterRole(kind="column", fused=2),
    "packed_rowwise": ParameterRole(kind="row", fused=2),
    "moe_tp_experts": ParameterRole(kind="local"),
}
UNSHARDED_STYLES = ("replicate", "sequence_parallel", "replicated_with_grad_allreduce", "all_reduce", "local_params")
KEY_VALUE_NAMES, QUERY_NAMES = ("k_proj", "v_proj"), ("q_proj", "o_proj")


def read_model_plan(model: nn.Module, *, ranks: int) -> TensorPlan | None:
    """Return the tensor plan that the model's class or config contains, or None without such a plan.

    Some styles of Hugging Face gather the output of a layer. Here this output remains sharded until a function needs
    the full tensor.

    Raises:
        LayoutError: a style is unknown; the message names it.
    """
    styles = _styles(model)
    if not styles:
        return None
    roles, notes = {}, []
    config: Any = getattr(model, "config", None)
    for pattern, style in styles.items():
        if style in UNSHARDED_STYLES:
            continue
        if style not in STYLES:
            raise LayoutError(
                f"{type(model).__name__} splits {pattern} as {style!r}, which Paceline does not know.",
                hint="derive the plan from a batch, or write it: see docs/tensor.md",
            )
        heads = _heads(pattern, config)
        if pattern.endswith(KEY_VALUE_NAMES) and heads is not None and heads % ranks:
            notes.append(f"{pattern} stays whole: {heads} key-value heads are not divisible by tp={ranks}")
            continue
        base = STYLES[style]
        roles[pattern] = ParameterRole(kind=base.kind, fused=base.fused, dim=base.dim, heads=heads)
    return TensorPlan(roles=roles, source="the model's own", notes=tuple(notes))


def _styles(model: nn.Module) -> dict[str, str]:
    """Return the model's own patterns, and its base model's patterns prefixed with the base model's name."""
    styles: dict[str, str] = {}
    prefix = getattr(model, "base_model_prefix", "")
    config: Any = getattr(model, "config", None)
    base: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    module_prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    styles.update({f"{module_prefix}{pattern}": style for pattern, style in base.items()})
    styles.update(getattr(type(model), "_tp_plan", None) or {})
    return styles


def _heads(pattern: str, config: Any) -> int | None:
    heads = getattr(config, "num_attention_heads", None)
    if pattern.endswith(KEY_VALUE_NAMES):
        return getattr(config, "num_key_value_heads", None) or heads
    return heads if pattern.endswith(QUERY_NAMES) else None
