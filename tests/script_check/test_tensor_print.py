"""Summaries of tensors by chunks in float32 are those of the whole tensor in float64, and of its parts together."""

from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.script_check.recorder import tensor_print
from paceline.script_check.recorder.tensor_print import print_tensor, project_tensor
from paceline.script_check.recording import TensorPrint
from paceline.verification.fingerprints.fingerprint import Vector, projection_signs

BLOCK = 4096
SIZES = [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 64 * BLOCK, 64 * BLOCK + 1, 300_000]


def exact_projections(tensor: Tensor) -> Vector:
    values = tensor.double().reshape(-1).numpy()
    padded = np.zeros(-(-len(values) // BLOCK) * BLOCK)
    padded[: len(values)] = values
    positions, blocks = projection_signs(len(values))
    return ((padded.reshape(-1, BLOCK) @ positions) * blocks).sum(axis=0)


def print_part(whole: Tensor, part: Tensor, place: tuple[tuple[int, int], ...]) -> TensorPrint:
    with mock.patch.object(tensor_print, "_local_part", return_value=(part, place, tuple(whole.shape))):
        return print_tensor(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_chunks_in_float32_add_up_to_the_exact_summary(size: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):  # hooks run within the script's autocast
        summary = print_tensor(tensor, scale=0.5)
        own = project_tensor(tensor)
    exact = exact_projections(tensor)
    assert np.abs(np.array(summary.projections) - exact / 2).max() < 1e-5 * summary.norm
    assert np.abs(np.array(own) - exact).max() < 2e-5 * summary.norm
    assert summary.norm == pytest.approx(float(tensor.double().norm()) / 2, rel=1e-5)
    assert summary.largest == float(tensor.double().abs().max()) / 2


@pytest.mark.parametrize(("axis", "cut"), [(0, 3), (1, 701)], ids=["in one piece", "with gaps"])
def test_the_summaries_of_parts_add_up(axis: int, cut: int) -> None:
    whole = torch.randn(7, 1500, generator=torch.Generator().manual_seed(0))
    parts = []
    for start, length in ((0, cut), (cut, whole.shape[axis] - cut)):
        place = [(0, 7), (0, 1500)]
        place[axis] = (start, length)
        parts.append(print_part(whole, whole.narrow(axis, start, length), tuple(place)))
    all_of_it = print_tensor(whole)
    assert sum(part.digest for part in parts) % (1 << 64) == all_of_it.digest
    total = np.sum([part.projections for part in parts], axis=0)
    assert np.abs(total - all_of_it.projections).max() < 1e-5 * all_of_it.norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.bool])
def test_one_changed_bit_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = torch.ones(70, 4000).to(dtype)
    changed = tensor.clone()
    changed[69, 77] = (
        0 if not dtype.is_floating_point else torch.nextafter(changed[69, 77], torch.tensor(2.0, dtype=dtype))
    )
    assert print_tensor(tensor).digest != print_tensor(changed).digest
    assert print_tensor(tensor).digest == print_tensor(tensor.clone()).digest


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_squares_beyond_float32_are_added_in_float64(size: float) -> None:
    summary = print_tensor(torch.full((2 * BLOCK,), size))
    assert summary.norm == pytest.approx(size * (2 * BLOCK) ** 0.5, rel=1e-5)
    assert all(np.isfinite(summary.projections))


def test_a_value_that_is_no_number_shows() -> None:
    tensor = torch.ones(2 * BLOCK)
    tensor[BLOCK + 5] = float("nan")
    assert not np.isfinite(print_tensor(tensor).norm) and not np.isfinite(project_tensor(tensor)[0])
