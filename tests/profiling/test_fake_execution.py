"""Fake execution without values against real execution: the same operations, tensors and bytes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.profiling.model_tracing.fake_execution import SMALL_ELEMENTS, FakeExecutionMode, FakeStorages
from paceline.profiling.model_tracing.memory_tracker import MemoryTracker, StorageTracker
from paceline.torch_internals.dispatch_modes import PendingCollective, hide_from_modes

LARGE = 128  # a square of so many elements a side has no numbers
Operation = Callable[[Tensor], Any]


def whole(*shape: int) -> Tensor:
    return torch.ones(*(shape or (LARGE, LARGE)))


def form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.storage_offset(), value.untyped_storage().nbytes()
    return [form(part) for part in value] if isinstance(value, list | tuple) else value


OPERATIONS: dict[str, Operation] = {
    "transposed": lambda x: x.t() @ x,
    "views": lambda x: [x[3:, ::2], x.view(-1)[5:], x.unfold(0, 4, 2), x.expand(2, *x.shape), x.detach()],
    "chunks": lambda x: torch.cat([part * 2 for part in x.chunk(3)], 1 if x.dim() > 1 and x.shape[0] % 3 == 0 else 0),
    "halves": lambda x: (x.bfloat16() @ x.bfloat16(), x.double().sum(0), x.half().t().contiguous()),
    "norms": lambda x: (F.layer_norm(x, [LARGE]), F.softmax(x, -1), x.std(1), torch.linalg.vector_norm(x)),
    "picked": lambda x: (x[torch.arange(7)], x.index_select(1, torch.tensor([1, 5])), x.gather(0, torch.zeros(2, 9).long())),
    "masked": lambda x: x[torch.arange(LARGE) % 3 == 0],
    "selected": lambda x: (x.masked_select(torch.arange(LARGE) % 3 == 0), x.masked_select(x > 0), x.nonzero()),
    "written": lambda x: (x.clone().add_(1), x.clone().masked_fill_(x > 0, 0), torch.empty_like(x).copy_(x.t())),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 4, 32, LARGE)] * 3, is_causal=True),
    "pictures": lambda x: F.max_pool2d(F.conv2d(x.view(1, 4, 64, 64), torch.ones(8, 4, 3, 3)), 2),
    "loss": lambda x: F.cross_entropy(x, torch.arange(LARGE), reduction="none"),
    "embedded": lambda x: F.embedding(torch.arange(9).view(3, 3), x),
    "best": lambda x: torch.topk(x, 3)[1].dtype,
}  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_results_have_the_form_that_they_really_have(operation: Operation) -> None:
    expected = form(operation(whole()))
    with FakeExecutionMode():
        found = operation(whole())
    assert form(found) == expected


@pytest.mark.parametrize("asked", [{}, {"return_inverse": True}, {"return_counts": True}])
def test_numbers_that_are_not_there_all_differ(asked: dict[str, bool]) -> None:
    numbers = torch.arange(float(LARGE * LARGE)).view(LARGE, LARGE)
    expected = form(torch.unique(numbers, **asked))
    with FakeExecutionMode():
        found = torch.unique(numbers, **asked)
    assert form(found) == expected


def test_a_view_is_the_memory_it_was_given() -> None:
    with FakeExecutionMode():
        x = whole()
        assert x[2:].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert x.clone().untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_integers_booleans_and_what_is_small_keep_their_values() -> None:
    with FakeExecutionMode():
        ids = torch.arange(SMALL_ELEMENTS * 2)
        assert (int(ids[-1]), int((ids % 2 == 0).sum())) == (SMALL_ELEMENTS * 2 - 1, SMALL_ELEMENTS)
        assert torch.full((3,), 2.5).sum().item() == 7.5
        assert bool(torch.isfinite(whole()).all())


def test_of_a_number_that_is_not_there_the_answer_is_in_its_favour() -> None:
    with FakeExecutionMode() as hollow:
        assert whole().sum().item() == 1.0
        assert bool((whole() > 3).all())
        hollow.comparisons_are_true = False
        assert not bool((whole() > 3).any())


def test_building_with_draws_that_are_repeated_until_all_fit_ends() -> None:
    with FakeExecutionMode() as hollow:
        hollow.comparisons_are_true = False
        drawn = torch.empty(LARGE, LARGE).normal_()
        for _ in range(3):
            if not bool((drawn.abs() > 2).any()):
                break
            drawn.normal_()
        else:
            pytest.fail("draws that don't fit never end")


def test_experts_get_equally_many_tokens() -> None:
    with FakeExecutionMode():
        scores = F.softmax(whole(4 * LARGE, 8) @ torch.ones(8, 8), -1)
        chosen = torch.topk(scores, 2, dim=-1)[1]
        counts = torch.bincount(chosen.flatten(), minlength=8)
    assert counts.tolist() == [LARGE] * 8


def test_nothing_is_written() -> None:
    from benchmarks.memory.resident import resident_now

    before = resident_now()
    with FakeExecutionMode():
        kept = [whole(1 << 14, 1 << 12) * 2 for _ in range(8)]  # 2 GiB, were it there
        deep = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))
        deep(kept[0]).sum().backward()
    assert resident_now() - before < 64 << 20


def encoder() -> tuple[nn.Module, Callable[[], Any]]:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.1), 2)
    return model, lambda: torch.ones(4, 32, 64)


def pictures() -> tuple[nn.Module, Callable[[], Any]]:
    body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(True), nn.Conv2d(16, 8, 3, 2))
    return nn.Sequential(body, nn.Flatten(), nn.Linear(8 * 15 * 15, 40)), lambda: torch.ones(4, 3, 32, 32)


def recurrent() -> tuple[nn.Module, Callable[[], Any]]:
    return nn.LSTM(64, 96, 2, batch_first=True), lambda: torch.ones(4, 40, 64)


def watched(make: Callable[[], tuple[nn.Module, Callable[[], Any]]]) -> MemoryTracker:
    torch.manual_seed(0)
    model, batch = make()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        found = model(batch())
        (found[0] if isinstance(found, tuple) else found).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with MemoryTracker(model=model, optimizers=[optimizer]) as watch:
        step()
    return watch


@pytest.mark.parametrize("make", [encoder, pictures, recurrent])
def test_a_step_holds_at_most_what_it_really_holds(make: Any) -> None:
    real = watched(make)
    with FakeExecutionMode():
        said = watched(make)
    assert said.peak == real.peak
    assert said.kept_bytes == real.kept_bytes > 0


def test_what_was_there_before_counts_where_it_is_told() -> None:
    made = StorageTracker()
    with FakeExecutionMode(on_operation=made.observe):
        scratch, gone = torch.zeros(1 << 20), torch.zeros(1 << 10)
        del gone
        model = nn.Linear(2, 2)
        with MemoryTracker(model=model, other_storages=made.finish()) as watch:
            model(torch.ones(1, 2))
    assert scratch.nbytes <= watch.peak.activations < scratch.nbytes + 4096


def test_emptied_memory_is_forgotten_when_it_goes() -> None:
    emptied = FakeStorages()
    with FakeExecutionMode(fake_storages=emptied):
        x = whole() * 2
        assert emptied.has(x)
        assert not emptied.has(torch.arange(4))
        del x
        assert not emptied._storages


def test_a_journey_keeps_what_it_was_given_until_it_is_waited_for() -> None:
    arrived, kept = [], whole()
    storage = kept.untyped_storage()
    made = StorageTracker()
    made.observe(None, (), {}, kept)
    journey = PendingCollective(lambda: arrived.append(1), inputs=[kept])
    journey.start()
    del kept, storage
    assert len(made.finish()) == 1
    assert not journey.is_completed()
    assert journey.wait()
    assert journey.wait()
    assert journey.is_completed()
    assert (arrived, made.finish()) == ([1], [])


def test_what_is_hidden_from_modes_has_numbers() -> None:
    with FakeExecutionMode(), hide_from_modes():
        assert whole().sum().item() == LARGE * LARGE
