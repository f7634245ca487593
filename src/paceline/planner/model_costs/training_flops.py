"""Count the training FLOPs of a model, from which its MFU is computed.

Model FLOPs utilization (MFU; Chowdhery et al., "PaLM", 2022, appendix B) is the model's own FLOPs per second as a
fraction of the device's peak for dense matmuls in the precision in use. For a transformer with N parameters, a token
costs 6 N + 12 · layers · width · length FLOPs. Every parameter is one multiply-add in forward and two in backward, and
attention covers all pairs of positions. Recomputation to save memory does not count.
"""

from paceline.planner.model_costs.model_profile import ModelProfile

_PASSES = 3  # forward, and backward twice: for inputs and for weights
_MULTIPLY_ADD = 2


def model_flops(profile: ModelProfile) -> float:
    """Return the FLOPs of one optimizer step over all samples of the global batch.

    Matmuls are counted as they run in a forward: a convolution at all its positions, a mixture of experts with its
    active experts. As usual, attention counts all pairs of positions, masked or not, and the embedding table of a
    sequence model counts as a matmul. In backward, a frozen weight needs no matmul for its own gradient.
    """
    batch = {"samples": profile.global_batch_size, "length": profile.length}
    positions = profile.global_batch_size * profile.length if profile.length > 1 else 0
    total = 0.0
    for part in profile.parts:
        trained_fraction = 1 - part.frozen_parameters / part.parameters if part.parameters else 1.0
        matmuls = part.matmul_flops.evaluate(**batch) + _MULTIPLY_ADD * part.lookup_parameters * positions
        attention = (part.attention_flops + part.masked_flops).evaluate(**batch)
        total += (_PASSES - 1 + trained_fraction) * matmuls + _PASSES * attention
    return total
