"""Build the profile of a decoder-only transformer from its sizes, for planning a model that does not exist yet.

Operations and activations are counted tensor by tensor, as by Korthikanti et al. ("Reducing Activation Recomputation in
Large Transformer Models", MLSys 2023). With GELU, dropout and 16-bit types, a block saves 34·s·b·h + 5·a·s²·b bytes, as
in their paper (s positions, b samples, h width, a heads). Grouped-query attention is that of Ainslie et al. (2023), and
the gated MLP that of Shazeer (2020). Experts are routed as by Fedus et al. (2022); only active experts cost time.
"""

from dataclasses import dataclass, replace

from paceline.planner.model_costs.model_profile import (
    ZERO,
    BatchScaling,
    LayerProfile,
    ModelProfile,
    OptimizerFootprint,
)

# The state is two float32 moments. `moment_bytes` are the bytes of temporaries during the update, not of a moment.
ADAMW = OptimizerFootprint(name="AdamW", state_bytes=8.0, moment_bytes=4.0)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The sizes of a decoder."""

    layers: int
    width: int
    """The width of the residual stream."""
    mlp_width: int
    """The width of the MLP's hidden layer."""
    heads: int
    """The number of attention heads, which is the number of heads of queries."""
    kv_heads: int = 0
    """The number of heads of keys and values; 0 if it equals `heads`."""
    vocabulary: int
    is_gated: bool = True
    """Whether the MLP is SwiGLU, with three matrices."""
    is_tied: bool = False
    """Whether the output layer shares its weight with the embedding."""
    has_dropout: bool = False
    experts: int = 0
    """The number of experts that replace the MLP; 0 if there are none."""
    active: int = 0
    """The number of experts that each token uses."""

    @property
    def kv_width(self) -> int:
        """The total width of the heads of a token's keys; its values have the same width."""
        return self.width // self.heads * (self.kv_heads or self.heads)

    @property
    def mlp_matrices(self) -> int:
        """The number of matrices of one MLP or expert."""
        return 3 if self.is_gated else 2


def build_decoder_profile(
    sizes: Decoder,
    *,
    name: str,
    length: int,
    global_batch_size: int,
    precision: str = "bf16",
    residual_bytes: int | None = None,
    is_fused: bool = False,
    is_flash: bool = True,
) -> ModelProfile:
    """Return the profile of a decoder with float32 parameters, for samples of `length` tokens.

    With `precision` bf16, matmuls are in bfloat16. The residual stream stays in float32, as under autocast, but
    `residual_bytes` can set other bytes per element. With `is_fused`, a compiler fuses elementwise operations: a norm
    or a rotation reads and writes its tensor once, not once for each of its operations. The nonlinearity of an MLP
    without a gate then reads and writes nothing. Without `is_flash`, attention writes and reads the scores of all pairs
    of positions for each operation: scale and mask, softmax, dropout.
    """
    short_bytes = 4 if precision == "fp32" else 2  # of an element in matmuls
    residual_stream_bytes = residual_bytes or 4  # of an element of the residual stream
    block = _block(sizes, short_bytes, residual_stream_bytes, is_fused=is_fused)
    if not is_flash:
        score_bytes = (6 * short_bytes + (2 * short_bytes + 1 if sizes.has_dropout else 0)) * sizes.heads
        block = replace(
            block,
            attention_flops=BatchScaling(pair=4.0 * sizes.width),
            masked_flops=ZERO,
            moved_bytes=block.moved_bytes + BatchScaling(pair=float(score_bytes)),
            fused_bytes=block.fused_bytes + BatchScaling(pair=float(score_bytes)),
            attention_saved_bytes=ZERO,  # nothing to subtract: without fused attention, all scores are saved
        )
    table_elements = sizes.vocabulary * sizes.width  # of the embedding, and of the output layer
    first = LayerProfile(
        name="embedding",
        split_parameters=table_elements,
        lookup_parameters=0 if sizes.is_tied else table_elements,
        tensors=(table_elements,),
        moved_bytes=BatchScaling(token=2.0 * residual_stream_bytes * sizes.width),
        saved_bytes=BatchScaling(token=8.0),
        output_bytes=BatchScaling(token=float(residual_stream_bytes * sizes.width)),
        tp_bytes=BatchScaling(token=float(residual_stream_bytes * sizes.width)),
        tp_calls=1,
    )
    max_cp = min(64, length // 2)
    return ModelProfile(
        name=name,
        first=first,
        blocks=tuple(replace(block, name=f"layers.{i}") for i in range(sizes.layers)),
        last=_head(sizes, short_bytes, residual_stream_bytes),
        optimizer=ADAMW,
        global_batch_size=global_batch_size,
        length=length,
        tied=table_elements if sizes.is_tied else 0,
        precision=precision,
        tp_sizes=tuple(n for n in range(2, 65) if not sizes.heads % n and not (sizes.kv_heads or sizes.heads) % n),
        cp_sizes=tuple(n for n in (2, 4, 8, 16, 32, 64) if n <= max_cp),
        ep_sizes=tuple(n for n in range(2, sizes.experts + 1) if not sizes.experts % n),
    )


def _moved_bytes(sizes: Decoder, short_bytes: int, wide_bytes: int, *, is_fused: bool) -> float:
    """Return the bytes per token that norms, rotary embedding, residual sums and the nonlinearity read and write.

    A block has two norms, the rotation of queries and keys, and two sums. Unfused, a norm is a square, a mean, two
    products and a cast; a rotation is two products, a swap of halves and a sum. The nonlinearity is SwiGLU with a gate,
    and GELU without one; with `is_fused`, GELU is assumed to move no bytes. An element has `short_bytes` in matmuls and
    `wide_bytes` in the residual stream.
    """
    # the widths of the residual stream, of the keys, and of the hidden layers of all active experts
    h, k, f = sizes.width, sizes.kv_width, sizes.mlp_width * max(1, sizes.active)
    sums, passes = 2 * (2 * wide_bytes + short_bytes) * h, 5 if sizes.is_gated else 2
    if is_fused:
        return float(
            2 * (wide_bytes + short_bytes) * h + 2 * short_bytes * (h + k) + sums + (passes - 2) * short_bytes * f
        )
    return float(2 * (8 * wide_bytes + short_bytes) * h + 10 * short_bytes * (h + k) + sums + passes * short_bytes * f)


def _block(sizes: Decoder, short_bytes: int, wide_bytes: int, *, is_fused: bool) -> LayerProfile:
    """Return the profile of one block with fused attention."""
    # the widths of the residual stream, of the keys, and of the hidden layer of one MLP or expert
    h, k, f = sizes.width, sizes.kv_width, sizes.mlp_width
    attention = 2 * h * h + 2 * h * k
    mlp = sizes.mlp_matrices * h * f
    is_routed = sizes.experts > 0
    active_experts = sizes.active if is_routed else 1
    inner = (2 * f * (2 if sizes.is_gated else 1)) * active_experts  # input and output of the nonlinearity
    norms = 2 * h if sizes.is_gated else 4 * h
    masks = 2 * h if sizes.has_dropout else 0
    saved = 2 * (wide_bytes + short_bytes) * h + masks
    split = short_bytes * (h + 2 * k + h + inner) + (short_bytes * h * active_experts if is_routed else 0)
    scores = sizes.heads * (2 * short_bytes + (1 if sizes.has_dropout else 0))
    products = short_bytes * (2 * h + 2 * k + h + (2 * f if sizes.is_gated else f) * active_experts + h)
    return LayerProfile(
        name="layer",
        whole_parameters=norms + (h * sizes.experts),
        split_parameters=attention + (0 if is_routed else mlp),
        expert_parameters=mlp * sizes.experts,
        tensors=(h * h, h * h, h * k, h * k, *(h * f,) * sizes.mlp_matrices * max(1, sizes.experts)),
        matmul_flops=BatchScaling(token=2.0 * (attention + h * sizes.experts + mlp * active_experts)),
        expert_flops=BatchScaling(token=2.0 * mlp * active_experts) if is_routed else BatchScaling(),
        attention_flops=BatchScaling(pair=2.0 * h),  # two products of 2·h each, half of the pairs masked
        masked_flops=BatchScaling(pair=2.0 * h),
        moved_bytes=BatchScaling(token=_moved_bytes(sizes, short_bytes, wide_bytes, is_fused=is_fused)),
        fused_bytes=BatchScaling(token=_moved_bytes(sizes, short_bytes, wide_bytes, is_fused=True)),
        saved_bytes=BatchScaling(token=float(saved)),
        split_saved_bytes=BatchScaling(
            fixed=float(short_bytes * (attention + (0 if is_routed else mlp)) if short_bytes < 4 else 0),
            token=float(split),
            pair=float(scores),
        ),
        # fused attention saves no scores, so the planner subtracts these bytes from the saved ones on accelerators
        attention_saved_bytes=BatchScaling(pair=float(scores)),
        selective_saved_bytes=BatchScaling(token=float(products)),
        output_bytes=BatchScaling(token=float(wide_bytes * h)),
        peak_bytes=BatchScaling(token=float(short_bytes * inner + wide_bytes * h)),
        tp_bytes=BatchScaling(token=2.0 * short_bytes * h),
        tp_calls=2,
        ep_bytes=BatchScaling(token=2.0 * short_bytes * h * active_experts) if is_routed else BatchScaling(),
        cp_bytes=BatchScaling(token=2.0 * short_bytes * k),
    )


def _head(sizes: Decoder, short_bytes: int, wide_bytes: int) -> LayerProfile:
    """Return the profile of the last norm, the output layer and the loss.

    The logits exist in the matmul type and in float32.
    """
    h, v = sizes.width, sizes.vocabulary
    return LayerProfile(
        name="head",
        whole_parameters=h,
        split_parameters=v * h,
        tensors=(h, v * h),
        matmul_flops=BatchScaling(token=2.0 * h * v),
        moved_bytes=BatchScaling(token=float((2 * wide_bytes + short_bytes) * h + (short_bytes + 4 + 4) * v)),
        saved_bytes=BatchScaling(token=float((wide_bytes + short_bytes) * h)),
        split_saved_bytes=BatchScaling(fixed=float(short_bytes * v * h if short_bytes < 4 else 0), token=float(4 * v)),
        output_bytes=BatchScaling(token=4.0),
        peak_bytes=BatchScaling(token=float((4 + short_bytes) * v)),
        tp_bytes=BatchScaling(token=12.0),
        tp_calls=3,
    )
