"""Gradients of a narrow type accumulate in a wide type, and a skipped step restores what it wrote."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.parallel.compression import quantized as dense
from paceline.parallel.compression.codecs import Bf16
from paceline.parallel.compression.quantized import QuantizedBucket
from paceline.parallel.compression.residual_memory import DoubleBufferedTensors, accumulation_dtype
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.step.synchronous import SynchronousStep

RANKS = 300


class Alike(World):
    """Ranks that all send what this one does."""

    def start_all_to_all(self, target: Tensor, source: Tensor) -> Any:
        target.copy_(source[:1].expand_as(target))
        return lambda: None


def gathered(packed: Tensor, *, out: Tensor, world: World) -> Any:
    out.copy_(packed.unsqueeze(0).expand_as(out))
    return lambda: None


def test_many_small_gradients_of_a_bf16_model_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "start_all_gather", gathered)
    parameter = nn.Parameter(torch.zeros(RANKS, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 1 + 2**-7)
    bucket = QuantizedBucket([NamedParameter(index=0, name="weight", parameter=parameter)], codec=Bf16(), ranks=RANKS)
    bucket.launch(Alike(device=torch.device("cpu")))
    bucket.start_second_message()
    bucket.finish(float(RANKS))
    assert parameter.grad is not None and parameter.grad.dtype == torch.bfloat16
    # in bfloat16 the sum would stand still at 256; the sum itself crosses with 8 bits, so that half of 2^-7 may be lost
    assert (parameter.grad.float() - (1 + 2**-7)).abs().max() <= 2**-7


def test_what_sums_are_held_in() -> None:
    assert {t: accumulation_dtype(t) for t in (torch.bfloat16, torch.float16, torch.float32, torch.float64)} == {
        torch.bfloat16: torch.float32,
        torch.float16: torch.float32,
        torch.float32: torch.float32,
        torch.float64: torch.float64,
    }


def test_a_finite_step_that_is_left_out_leaves_what_is_held_back_as_it_was() -> None:
    memory = DoubleBufferedTensors({"weight": (3,)}, dtype=torch.float32, device=torch.device("cpu"))
    for value, taken in ((1.0, True), (10.0, False), (100.0, True)):
        before = memory.current["weight"].clone()
        memory.add_gradients([torch.full((3,), value)])
        memory.commit(is_finite=torch.tensor(True), unused_names=())
        assert not torch.equal(memory.current["weight"], before)
        if not taken:  # finite, and skipped for its norm: undo is all that takes it back
            memory.undo()
            memory.undo()  # a second time changes nothing
            assert torch.equal(memory.current["weight"], before)
    assert memory.current["weight"].tolist() == [101.0] * 3


@pytest.mark.parametrize("taken", [True, False])
def test_only_a_skipped_step_restores_statistics_and_what_is_held_back(taken: bool) -> None:
    undone: list[str] = []
    step: Any = SynchronousStep.__new__(SynchronousStep)
    step.steps_done = 3
    step.replica = SimpleNamespace(
        update=SimpleNamespace(commit=lambda **_: (None, taken)),
        state_recorders=[SimpleNamespace(end_skipped_step=lambda: undone.append("statistics"))],
        undo_reduction=lambda: undone.append("held back"),
    )
    result: Any = SimpleNamespace(totals=SimpleNamespace(nonfinite_terms=()), compute_seconds=0.0)
    step._commit_update(result, 1.0, {})
    assert undone == ([] if taken else ["statistics", "held back"])
    assert result.skipped is not taken and step.steps_done == 4
