"""In float64 mode a model's own casts to float32 keep float64, and nothing is left behind."""

import threading

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.verification.reference.float64_mode import keep_float64


def mixed(x: Tensor) -> list[Tensor]:
    """What models do to their activations."""
    return [
        x.float(),
        x.to(torch.float32),
        x.to(dtype=torch.float32),
        x.type(torch.float32),
        F.softmax(x, dim=-1, dtype=torch.float32),
        x.softmax(-1, dtype=torch.float32),
        torch.log_softmax(x, -1, dtype=torch.float32),
    ]


def test_float64_stays_so_inside_and_only_inside() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    assert {value.dtype for value in mixed(x)} == {torch.float32}
    with keep_float64():
        assert {value.dtype for value in mixed(x)} == {torch.float64}
        assert {value.dtype for value in mixed(x.to(torch.bfloat16))} == {torch.float32}
        assert x.to(torch.int64).dtype is torch.int64
        seen: list[torch.dtype] = []
        thread = threading.Thread(target=lambda: seen.extend(value.dtype for value in mixed(x)))
        thread.start()
        thread.join()
        assert set(seen) == {torch.float64}
    assert {value.dtype for value in mixed(x)} == {torch.float32}
    with keep_float64(active=False):
        assert {value.dtype for value in mixed(x)} == {torch.float32}
