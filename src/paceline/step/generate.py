"""Text generation: extend sequences of token ids by repeated forwards, with the same result on every rank."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.torch_internals.rng import preserve_rng, seed_torch, stream_key


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    *,
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    context: int | None = None,
    seed: int = 0,
    forward: Callable[[Tensor], Any] | None = None,
) -> Tensor:
    """Return `prompt`, of shape `[batch, length]`, with `num_tokens` generated token ids appended to each row.

    The model maps ids to logits `[batch, length, vocabulary]`, or to an output with `.logits`. `context` is the
    largest number of ids that the model accepts. With temperature 0, the most likely id is chosen. With `top_k`, only
    the k most likely ids are sampled. `forward` is called instead of the model if the model's stages are on several
    ranks.
    """
    forward = forward or model
    was_training = model.training
    model.eval()
    ids = prompt
    with preserve_rng():
        seed_torch(stream_key(seed, "generate"))
        for _ in range(num_tokens):
            window = ids if context is None else ids[:, -context:]
            logits = output_logits(forward(window))[:, -1].float()
            ids = torch.cat([ids, _sample_token(logits, temperature, top_k)], dim=1)
    model.train(was_training)
    return ids


def output_logits(output: Any) -> Tensor:
    """Return an output's `.logits`, or the output itself if it has none."""
    logits: Tensor = getattr(output, "logits", output)
    return logits


def _sample_token(logits: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """Return the next token id of each row. `logits` are those of the row's last position."""
    if temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        threshold = torch.topk(logits, min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    return torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1)
