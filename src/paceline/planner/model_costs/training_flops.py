"""The training FLOPs of a model, by which its MFU is computed.

Model FLOPs utilization (Chowdhery et al., "PaLM", 2022, appendix B) is the model's own FLOPs per second as a fraction
of the device's peak for dense matmuls in the number format in use. For a transformer with N parameters, a token costs 6
N + 12 · layers · width · length: forward once and backward twice, every parameter a multiply-add, attention over all
pairs of positions. Recomputation to save memory does not count.
"""

from paceline.planner.model_costs.model_profile import ModelProfile

_PASSES = 3  # forward, and backward twice: for inputs and for weights
_MULTIPLY_ADD = 2


def model_flops(facts: ModelProfile) -> float:
    """Return the FLOPs of one optimizer step over all samples of the global batch.

    Matmuls are counted as they run in a forward, so a convolution counts by its positions and a mixture of experts by
    its active ones. As is usual, attention counts all pairs, masked or not, and in a model of sequences an embedding
    table counts as a matmul. A weight that is not trained has no matmul of its own in backward.
    """
    at = {"samples": facts.global_batch_size, "length": facts.length}
    positions = facts.global_batch_size * facts.length if facts.length > 1 else 0
    total = 0.0
    for part in facts.parts:
        trained = 1 - part.frozen_parameters / part.parameters if part.parameters else 1.0
        products = part.matmul_flops.at(**at) + _MULTIPLY_ADD * part.lookup_parameters * positions
        attention = (part.attention_flops + part.masked_flops).at(**at)
        total += (_PASSES - 1 + trained) * products + _PASSES * attention
    return total
