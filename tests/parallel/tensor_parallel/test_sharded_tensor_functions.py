"""Single functions on sharded tensors equal the same on whole ones, gradients too; no loss gathers the whole."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.comm.rank_threads import thread_worlds
from paceline.parallel.tensor_parallel import tensor_parallel as placed
from paceline.parallel.tensor_parallel.collectives import WorldGroup, copy_to_parallel_region, take_local_shard
from paceline.parallel.tensor_parallel.rules.elementwise import local_dropout_mask
from paceline.parallel.tensor_parallel.sharded_tensor import RULES, ShardPropagatingTensor, function_name
from paceline.parallel.tensor_parallel.sharding import shard_evenly
from tests.parallel.tensor_parallel.tensor_parallel_models import run_group

assert placed
CLASSES, ROWS = 11, 6
TARGET = torch.tensor([0, 10, -100, 5, 6, 3])
WEIGHT = torch.linspace(0.5, 1.5, CLASSES, dtype=torch.float64)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def compare(
    work: Callable[[Any], Any], x: Tensor, *, dim: int, ranks: int = 3, sections: tuple[int, ...] = ()
) -> list[dict[str, None]]:
    """`work` on the whole and on its pieces; the notes of each rank."""
    whole = x.clone().requires_grad_(x.is_floating_point())
    expected = work(whole)
    expected.square().sum().backward()

    def piecewise(wire: WorldGroup) -> Any:
        leaf = x.clone().requires_grad_()
        cut = shard_evenly(x.shape[dim], ranks=ranks, sections=sections, dim=dim)
        found = work(ShardPropagatingTensor.from_local(take_local_shard(leaf, cut, wire), cut, wire))
        assert found.shape == expected.shape
        found = found.full_tensor() if isinstance(found, ShardPropagatingTensor) else found
        found.square().sum().backward()
        return found.detach(), leaf.grad, dict(wire.notes)

    results = run_group(piecewise, ranks=ranks)
    for found, grad, _ in results:
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-13, equal_nan=True)
        torch.testing.assert_close(grad, whole.grad, rtol=1e-12, atol=1e-13, equal_nan=True)
    return [told for _, _, told in results]


LOSSES: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: F.cross_entropy(x, TARGET),
    "sum": lambda x: F.cross_entropy(x, TARGET, reduction="sum"),
    "none": lambda x: F.cross_entropy(x, TARGET, reduction="none"),
    "smoothed": lambda x: F.cross_entropy(x, TARGET, label_smoothing=0.1),
    "weighted": lambda x: F.cross_entropy(x, TARGET, weight=WEIGHT),
    "both": lambda x: F.cross_entropy(x, TARGET, weight=WEIGHT, label_smoothing=0.2),
    "another ignored": lambda x: F.cross_entropy(x, TARGET.clamp(min=0), ignore_index=5),
    "shares": lambda x: F.cross_entropy(x, random(ROWS, CLASSES).softmax(1)),
    "shares smoothed": lambda x: F.cross_entropy(
        x, random(ROWS, CLASSES).softmax(1), weight=WEIGHT, label_smoothing=0.1
    ),
    "in two steps": lambda x: F.nll_loss(F.log_softmax(x, dim=-1), TARGET),
    "module": lambda x: (
        torch.nn.CrossEntropyLoss()(x.view(-1, CLASSES).float().double(), TARGET)
        if False
        else torch.nn.CrossEntropyLoss()(x.view(-1, CLASSES), TARGET)
    ),
    "by hand": lambda x: -(x.log_softmax(-1) * WEIGHT).sum(-1).mean(),
    "softmax": lambda x: torch.softmax(x, dim=-1),
    "probabilities": lambda x: x.softmax(-1).sum(-1),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_of_a_cut_vocabulary(kind: str) -> None:
    """Eleven classes on three ranks are 3, 4 and 4."""
    assert compare(LOSSES[kind], random(ROWS, CLASSES), dim=1) == [{}] * 3


def test_more_than_two_dimensions_and_shifted_views() -> None:
    labels = torch.tensor([[1, 2, -100], [10, 0, 4]])
    shifted = lambda x: F.cross_entropy(x[:, :-1].contiguous().view(-1, CLASSES), labels.view(-1))  # noqa: E731
    assert compare(shifted, random(2, 4, CLASSES), dim=2) == [{}] * 3
    turned = lambda x: F.cross_entropy(x.transpose(1, 2)[:, :, 1:], labels)  # noqa: E731
    assert compare(turned, random(2, 4, CLASSES), dim=2) == [{}] * 3


def test_the_best_class_and_equal_ones() -> None:
    x = random(ROWS, CLASSES)
    x[2, 3] = x[2, 8] = 9.0

    def work(wire: WorldGroup) -> Any:
        cut = shard_evenly(CLASSES, ranks=3, dim=1)
        split = ShardPropagatingTensor.from_local(take_local_shard(x, cut, wire), cut, wire)
        return split.argmax(-1).tolist(), split.argmax(1, keepdim=True).shape, (split.argmax(-1) == TARGET).sum().item()

    expected = (x.argmax(-1).tolist(), (ROWS, 1), int((x.argmax(-1) == TARGET).sum()))
    assert run_group(work, ranks=3) == [expected] * 3


def test_half_precision_is_summed_in_single() -> None:
    x = (random(ROWS, CLASSES) * 4).bfloat16()

    def work(wire: WorldGroup) -> Any:
        cut = shard_evenly(CLASSES, ranks=2, dim=1)
        return F.cross_entropy(ShardPropagatingTensor.from_local(take_local_shard(x, cut, wire), cut, wire), TARGET)

    for found in run_group(work, ranks=2):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, F.cross_entropy(x, TARGET), rtol=8e-3, atol=0.0)  # one unit of bfloat16


EDGES: dict[str, tuple[Tensor, Callable[[Any], Any]]] = {
    "nothing counts": (random(ROWS, CLASSES), lambda x: F.cross_entropy(x, torch.full_like(TARGET, -100))),
    "nothing counts, summed": (
        random(ROWS, CLASSES),
        lambda x: F.cross_entropy(x, torch.full_like(TARGET, -100), reduction="sum"),
    ),
    "no batch": (random(CLASSES), lambda x: F.cross_entropy(x, TARGET[1], weight=WEIGHT)),
    "more dimensions": (random(2, CLASSES, 3), lambda x: F.cross_entropy(x, TARGET.view(2, 3), weight=WEIGHT)),
    "a class that can not be": (
        random(ROWS, CLASSES).index_fill(1, torch.tensor([4]), float("-inf")),
        lambda x: F.cross_entropy(x, TARGET),
    ),
    "no number in a row that is ignored": (
        random(ROWS, CLASSES).index_fill(0, torch.tensor([2]), float("nan")),
        lambda x: F.cross_entropy(x, TARGET, reduction="none"),
    ),
    "a rank without a class": (random(ROWS, 2), lambda x: F.cross_entropy(x, TARGET.clamp(0, 1))),
    "no rows": (random(0, CLASSES), lambda x: F.cross_entropy(x, torch.zeros(0, CLASSES, dtype=torch.float64))),
    "bytes": (random(ROWS, CLASSES), lambda x: F.cross_entropy(x, TARGET.clamp(min=0).byte())),
    "as it was said once": (random(ROWS, CLASSES), lambda x: F.nll_loss(x, TARGET, size_average=False)),
}


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("kind", EDGES)
def test_a_loss_at_its_edges_is_that_of_the_whole(kind: str) -> None:
    x, loss = EDGES[kind]
    for ranks in (2, 3):
        compare(loss, x, dim=0 if x.dim() == 1 else 1, ranks=ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inside_of_autocast_a_loss_has_the_type_that_torch_gives_it(dtype: torch.dtype) -> None:
    x = random(ROWS, CLASSES).to(dtype)

    def losses(x: Any) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [F.cross_entropy(x, TARGET), F.nll_loss(x, TARGET)]

    def work(wire: WorldGroup) -> list[Tensor]:
        cut = shard_evenly(CLASSES, ranks=2, dim=1)
        return losses(ShardPropagatingTensor.from_local(take_local_shard(x, cut, wire), cut, wire))

    for found in run_group(work, ranks=2):
        torch.testing.assert_close(found, losses(x))


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
def test_what_torch_refuses_is_refused(loss: Callable[..., Tensor]) -> None:
    """One target for many rows, a word that is no reduction."""

    def work(wire: WorldGroup) -> None:
        cut = shard_evenly(CLASSES, ranks=2, dim=1)
        x = ShardPropagatingTensor.from_local(take_local_shard(random(ROWS, CLASSES), cut, wire), cut, wire)
        with pytest.raises(ValueError, match="batch_size"):
            loss(x, TARGET[:1])
        with pytest.raises(ValueError, match="not a valid value for reduction"):
            loss(x, TARGET, reduction="average")

    run_group(work, ranks=2)


def test_a_target_out_of_bounds_is_the_error_of_one_process() -> None:
    def work(wire: WorldGroup) -> Any:
        cut = shard_evenly(CLASSES, ranks=2, dim=1)
        return F.cross_entropy(
            ShardPropagatingTensor.from_local(take_local_shard(random(ROWS, CLASSES), cut, wire), cut, wire), TARGET + 1
        )

    with pytest.raises(IndexError, match="Target 11 is out of bounds"):
        run_group(work, ranks=2)


WHOLE = random(4, 6, 5)
KEPT: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], int]] = {
    "residual": (lambda x: x + WHOLE * 2 - x * 0.5, (4, 6, 5), 1),
    "broadcast": (lambda x: x * WHOLE[:1, :, :1] + WHOLE[0, 0], (4, 6, 5), 1),
    "merged": (lambda x: x.reshape(24, 5).tanh(), (4, 6, 5), 1),
    "heads": (lambda x: x.view(4, 3, 2, 5).transpose(1, 2).reshape(4, 2, 15), (4, 6, 5), 1),
    "where": (lambda x: torch.where(x > 0, x, WHOLE), (4, 6, 5), 1),
    "stacked": (lambda x: torch.stack([x, x * 2], 1).flatten(0, 1), (4, 6, 5), 1),
    "joined": (lambda x: torch.cat([x, WHOLE], -1), (4, 6, 5), 1),
    "joined along": (lambda x: torch.cat([x, x * 3], 1)[:, 6:], (4, 6, 5), 1),
    "repeated": (lambda x: x.repeat_interleave(2, 1).cumsum(-1), (4, 6, 5), 1),
    "picked": (lambda x: x[torch.tensor([3, 0, 0])][..., 1:4], (4, 6, 5), 1),
    "masked": (lambda x: x[torch.tensor([True, False, True, True])], (4, 6, 5), 1),
    "normed": (lambda x: F.layer_norm(x, (5,), WHOLE[0, 0], WHOLE[1, 0]), (4, 6, 5), 1),
    "sums": (lambda x: x.mean(-1) + x.sum(-1) + x.amax(2), (4, 6, 5), 1),
    "mean over it": (lambda x: x.mean(1) + x.sum((0, 1)), (4, 6, 5), 1),
    "product": (lambda x: torch.matmul(x.transpose(1, 2), WHOLE), (4, 6, 5), 1),
    "einsum": (lambda x: torch.einsum("bij,bik->bjk", x, WHOLE), (4, 6, 5), 1),
    "einsum kept": (lambda x: torch.einsum("bij,bkj->bik", x, WHOLE), (4, 6, 5), 1),
    "in place": (lambda x: (x * 1).mul_(WHOLE).add_(1), (4, 6, 5), 1),
    "moved": (lambda x: x.permute(2, 1, 0).unsqueeze(0).squeeze().movedim(1, 2), (4, 6, 5), 1),
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_keeps_the_cut(kind: str) -> None:
    work, shape, dim = KEPT[kind]
    assert compare(work, random(*shape), dim=dim) == [{}] * 3


@pytest.mark.parametrize("kind", ["flip", "fft", "softmin", "prod", "cross", "places"])
def test_what_no_rule_knows_is_right_and_noted(kind: str) -> None:
    work: dict[str, Callable[[Any], Any]] = {
        "flip": lambda x: x.flip(1), "fft": lambda x: torch.fft.fft(x, dim=1).abs(), "softmin": lambda x: F.softmin(x, 1),
        "prod": lambda x: x.prod(1), "cross": lambda x: torch.linalg.matrix_norm(x),
        "places": lambda x: x[torch.where(x > 0)] * 2,
    }  # fmt: skip
    told = compare(work[kind], random(4, 6, 5), dim=1)
    assert all("is gathered for" in note for each in told for note in each) and told[0]


def test_fused_projections() -> None:
    def work(x: Any) -> Any:
        q, k, v = x.split([4, 4, 4], dim=-1)
        a, b, c = x.view(5, 3, 2, 2).unbind(1)
        first, rest = x[..., :4], x[..., 4:]
        return (q * k).tanh() * v + (a * b - c).flatten(1) + first + rest.chunk(2, -1)[1]

    assert compare(work, random(5, 12), dim=1, ranks=2, sections=(4, 4, 4)) == [{}] * 2


def test_one_column_spreads_over_many_as_a_whole() -> None:
    told = compare(lambda x: x[:, 1:2] * random(5, 4) + x[:, 2:], random(5, 3), dim=1, ranks=2, sections=(1, 1, 1))
    assert all(told)


def test_grouped_attention() -> None:
    k, v = random(2, 2, 5, 3), random(2, 2, 5, 3) * 2

    def work(x: Any) -> Any:
        return F.scaled_dot_product_attention(x, k, v, is_causal=True, enable_gqa=True)

    assert compare(work, random(2, 4, 5, 3), dim=1, ranks=2) == [{}] * 2


def test_dropout_draws_as_the_whole_does() -> None:
    """In the order in which the whole's memory lies."""
    for order in ((0, 1, 2), (2, 0, 1)):
        x = random(4, 6, 5).permute(order)
        torch.manual_seed(7)
        expected = F.dropout(torch.ones_like(x), 0.4)

        def work(wire: WorldGroup, x: Tensor = x) -> Any:
            cut = shard_evenly(x.shape[1], ranks=2, dim=1)
            return x.narrow(1, cut.ranges(wire.rank)[0][0], cut.local_size(wire.rank)), cut

        for rank, (local, cut) in enumerate(run_group(work, ranks=2)):
            torch.manual_seed(7)
            wire: Any = WorldGroup(thread_worlds(replicas=2)[rank])
            start, stop = cut.ranges(rank)[0]
            assert torch.equal(local_dropout_mask(local, 0.4, cut, wire), expected[:, start:stop])


def test_writing_into_a_piece_by_an_unknown_function_is_refused() -> None:
    from paceline.errors import LayoutError

    def work(wire: WorldGroup) -> Any:
        cut = shard_evenly(6, ranks=2, dim=1)
        split = ShardPropagatingTensor.from_local(take_local_shard(random(4, 6), cut, wire), cut, wire)
        split[0] = 1.0

    with pytest.raises(LayoutError, match="__setitem__ writes in place"):
        run_group(work, ranks=2)


def test_every_rule_is_found_by_a_name_that_a_function_of_torch_has() -> None:
    places = (torch, Tensor, F, torch.linalg)
    functions = [getattr(place, name) for place in places for name in dir(place) if name != "_torch"]
    known = {function_name(function) for function in functions} | {f".{name}" for name in dir(Tensor)}
    assert [name for name in RULES if name not in known] == []


def test_what_was_put_together_without_gradients_is_not_used_with_them() -> None:
    def work(x: Any) -> Any:
        with torch.no_grad():
            seen = x.flip(1).sum()
        return x.flip(1) * seen

    assert len(compare(work, random(4, 6, 5), dim=1)) == 3


def test_a_value_that_cut_work_has_read_does_not_stay_for_ever() -> None:
    def work(wire: WorldGroup) -> bool:
        whole = random(4).requires_grad_() * 2
        assert copy_to_parallel_region(whole, wire) is copy_to_parallel_region(whole, wire)
        copy_to_parallel_region(whole, wire).sum().backward()
        gone = weakref.ref(whole)
        del whole
        gc.collect()
        return gone() is None

    assert run_group(work, ranks=2) == [True, True]


@pytest.mark.parametrize("padding", [3, -2, 6])
def test_the_padding_row_of_a_cut_vocabulary_is_not_trained(padding: int) -> None:
    ids = torch.tensor([[0, 6, 3], [3, 5, 1]])
    told = compare(lambda w: F.embedding(ids, w, padding_idx=padding), random(7, 4), dim=0, ranks=2)
    assert told == [{}] * 2
