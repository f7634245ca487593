"""Profile of a decoder-only transformer from its sizes alone, for planning a model that is not built yet.

Operations and activations are counted tensor by tensor, as Korthikanti et al. ("Reducing Activation Recomputation in
Large Transformer Models", MLSys 2023) do: with GELU, dropout and everything in 16 bits a block keeps their 34·s·b·h +
5·a·s²·b bytes. Grouped keys and values are those of Ainslie et al. (2023), the gated MLP is Shazeer's (2020); experts
are routed as by Fedus et al. (2022) and cost what their active ones do.
"""

from dataclasses import dataclass, replace

from paceline.planner.model_costs.model_profile import (
    NOTHING,
    BatchScaling,
    LayerProfile,
    ModelProfile,
    OptimizerFootprint,
)

ADAMW = OptimizerFootprint(name="AdamW", state_bytes=8.0, moment_bytes=4.0)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The sizes of a decoder: `width` of the residual stream, `hidden` of the MLP, `heads`, and `kv_heads`.

    `experts` replace the MLP, `active` of them for each token. `is_gated`: SwiGLU, three matrices; else two.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int = 0
    vocabulary: int
    is_gated: bool = True
    is_tied: bool = False
    has_dropout: bool = False
    experts: int = 0
    active: int = 0

    @property
    def kv_width(self) -> int:
        """The width of a token's keys, and of its values."""
        return self.width // self.heads * (self.kv_heads or self.heads)

    @property
    def mlp_matrices(self) -> int:
        """The number of matrices of one MLP or expert."""
        return 3 if self.is_gated else 2


def decoder_facts(
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
    """Return the profile of a decoder with float32 parameters.

    Under `bf16`, matmuls are in bfloat16 and the residual stream stays float32 (autocast), unless `residual_bytes`
    gives other bytes per element. With `is_fused`, a compiler fuses elementwise operations, so that a norm or a
    rotation reads and writes once; otherwise every operation does. Without `is_flash`, attention writes the scores of
    all pairs and reads them again: scaled and masked, normalised, dropped out.
    """
    short = 4 if precision == "fp32" else 2
    wide = residual_bytes or 4
    block = _block(sizes, short, wide, is_fused=is_fused)
    if not is_flash:
        passes = (6 * short + (2 * short + 1 if sizes.has_dropout else 0)) * sizes.heads
        block = replace(
            block,
            attention_flops=BatchScaling(pair=4.0 * sizes.width),
            masked_flops=NOTHING,
            moved_bytes=block.moved_bytes + BatchScaling(pair=float(passes)),
            fused_bytes=block.fused_bytes + BatchScaling(pair=float(passes)),
            attention_saved_bytes=NOTHING,
        )
    head = sizes.vocabulary * sizes.width
    first = LayerProfile(
        name="embedding",
        split_parameters=head,
        lookup_parameters=0 if sizes.is_tied else head,
        tensors=(head,),
        moved_bytes=BatchScaling(token=2.0 * wide * sizes.width),
        saved_bytes=BatchScaling(token=8.0),
        output_bytes=BatchScaling(token=float(wide * sizes.width)),
        tp_bytes=BatchScaling(token=float(wide * sizes.width)),
        tp_calls=1,
    )
    most = min(64, length // 2)
    return ModelProfile(
        name=name,
        first=first,
        blocks=tuple(replace(block, name=f"layers.{i}") for i in range(sizes.layers)),
        last=_head(sizes, short, wide),
        optimizer=ADAMW,
        global_batch_size=global_batch_size,
        length=length,
        tied=head if sizes.is_tied else 0,
        precision=precision,
        tp_sizes=tuple(n for n in range(2, 65) if not sizes.heads % n and not (sizes.kv_heads or sizes.heads) % n),
        cp_sizes=tuple(n for n in (2, 4, 8, 16, 32, 64) if n <= most),
        ep_sizes=tuple(n for n in range(2, sizes.experts + 1) if not sizes.experts % n),
    )


def _moved(sizes: Decoder, short: int, wide: int, *, is_fused: bool) -> float:
    """Return the bytes per token that norms, rotation, residual sums and the nonlinearity read and write.

    There are two norms, the rotation of queries and keys, and two sums. Unfused, a norm is a square, a mean, two
    products and a cast; a rotation is two products, a swap of halves and a sum.
    """
    h, k, f = sizes.width, sizes.kv_width, sizes.hidden * max(1, sizes.active)
    sums, passes = 2 * (2 * wide + short) * h, 5 if sizes.is_gated else 2
    if is_fused:
        return float(2 * (wide + short) * h + 2 * short * (h + k) + sums + (passes - 2) * short * f)
    return float(2 * (8 * wide + short) * h + 10 * short * (h + k) + sums + passes * short * f)


def _block(sizes: Decoder, short: int, wide: int, *, is_fused: bool) -> LayerProfile:
    h, k, f = sizes.width, sizes.kv_width, sizes.hidden
    attention = 2 * h * h + 2 * h * k
    mlp = sizes.mlp_matrices * h * f
    routed = sizes.experts > 0
    runs = sizes.active if routed else 1
    inner = (2 * f * (2 if sizes.is_gated else 1)) * runs  # input and output of the nonlinearity
    norms = 2 * h if sizes.is_gated else 4 * h
    masks = 2 * h if sizes.has_dropout else 0
    saved = 2 * (wide + short) * h + masks
    split = short * (h + 2 * k + h + inner) + (short * h * runs if routed else 0)
    scores = sizes.heads * (2 * short + (1 if sizes.has_dropout else 0))
    products = short * (2 * h + 2 * k + h + (2 * f if sizes.is_gated else f) * runs + h)
    return LayerProfile(
        name="layer",
        whole_parameters=norms + (h * sizes.experts),
        split_parameters=attention + (0 if routed else mlp),
        expert_parameters=mlp * sizes.experts,
        tensors=(h * h, h * h, h * k, h * k, *(h * f,) * sizes.mlp_matrices * max(1, sizes.experts)),
        matmul_flops=BatchScaling(token=2.0 * (attention + h * sizes.experts + mlp * runs)),
        expert_flops=BatchScaling(token=2.0 * mlp * runs) if routed else BatchScaling(),
        attention_flops=BatchScaling(pair=2.0 * h),  # two products of 2·h each, half of the pairs masked
        masked_flops=BatchScaling(pair=2.0 * h),
        moved_bytes=BatchScaling(token=_moved(sizes, short, wide, is_fused=is_fused)),
        fused_bytes=BatchScaling(token=_moved(sizes, short, wide, is_fused=True)),
        saved_bytes=BatchScaling(token=float(saved)),
        split_saved_bytes=BatchScaling(
            fixed=float(short * (attention + (0 if routed else mlp)) if short < 4 else 0),
            token=float(split),
            pair=float(scores),
        ),
        attention_saved_bytes=BatchScaling(pair=float(scores)),
        selective_saved_bytes=BatchScaling(token=float(products)),
        output_bytes=BatchScaling(token=float(wide * h)),
        peak_bytes=BatchScaling(token=float(short * inner + wide * h)),
        tp_bytes=BatchScaling(token=2.0 * short * h),
        tp_calls=2,
        ep_bytes=BatchScaling(token=2.0 * short * h * runs) if routed else BatchScaling(),
        cp_bytes=BatchScaling(token=2.0 * short * k),
    )


def _head(sizes: Decoder, short: int, wide: int) -> LayerProfile:
    """Return the last norm, the head and the loss, whose logits are kept in the matmul type and in float32."""
    h, v = sizes.width, sizes.vocabulary
    return LayerProfile(
        name="head",
        whole_parameters=h,
        split_parameters=v * h,
        tensors=(h, v * h),
        matmul_flops=BatchScaling(token=2.0 * h * v),
        moved_bytes=BatchScaling(token=float((2 * wide + short) * h + (short + 4 + 4) * v)),
        saved_bytes=BatchScaling(token=float((wide + short) * h)),
        split_saved_bytes=BatchScaling(fixed=float(short * v * h if short < 4 else 0), token=float(4 * v)),
        output_bytes=BatchScaling(token=4.0),
        peak_bytes=BatchScaling(token=float((4 + short) * v)),
        tp_bytes=BatchScaling(token=12.0),
        tp_calls=3,
    )
