"""The gradient norm over shards is right and the same for any sharding, bit for bit in exact mode."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.comm.rank_threads import thread_worlds
from paceline.config.settings import Settings, Train
from paceline.parallel.gradients.joint_grad_norm import joint_norm
from paceline.parallel.module_access.shard_spec import ShardSpec
from paceline.parallel.module_access.sharded_tensors import LocalTensor, ShardedTensors
from paceline.parallel.placement import ParallelizedModel
from paceline.trainer.setup import optimizers as updates


def spread(pieces: Sequence[Sequence[Tensor]], *, exact: bool) -> list[Tensor]:
    """Each thread is a rank with its own pieces."""
    worlds = thread_worlds(replicas=len(pieces), world=World.alone(), timeout_seconds=20)
    with ThreadPoolExecutor(len(pieces)) as pool:
        calls = [pool.submit(joint_norm, own, worlds=[w], exact=exact) for own, w in zip(pieces, worlds, strict=True)]
        return [call.result() for call in calls]


def drawn(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (1,), (300, 9), ()]
    return [torch.randn(shape, generator=generator, dtype=dtype) * scale * 3.0**-k for k, shape in enumerate(shapes)]


def cut(gradients: Sequence[Tensor], places: int) -> list[list[Tensor]]:
    flat = torch.cat([g.reshape(-1) for g in gradients])
    generator = torch.Generator().manual_seed(places)
    owner = torch.randint(0, places, flat.shape, generator=generator)
    return [[flat[owner == place][::2], flat[owner == place][1::2]] for place in range(places)]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_it_is_the_norm_and_the_same_on_every_rank(exact: bool, dtype: torch.dtype, scale: float) -> None:
    gradients = drawn(dtype, scale)
    square = sum(Fraction(x) ** 2 for g in gradients for x in g.double().reshape(-1).tolist())
    right = math.sqrt(square / Fraction(scale) ** 2) * scale
    for places in (2, 3, 5):
        found = spread(cut(gradients, places), exact=exact)
        assert len({float(norm) for norm in found}) == 1 and found[0].dtype is torch.float64
        rounded = dtype is torch.float32 and scale == 1.0 and not exact  # the rows' norms are float32
        assert abs(float(found[0]) / right - 1) < (1e-7 if rounded else 1e-12)


def test_it_is_as_right_over_millions_of_elements_as_over_few() -> None:
    gradient = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0)) * 1e-3
    right = float(torch.linalg.vector_norm(gradient.double()))
    assert abs(float(joint_norm([gradient], worlds=[])) / right - 1) < 1e-8
    assert abs(float(nn.utils.get_total_norm([gradient])) / right - 1) > 1e-6, "then rows are not needed"


def test_exact_bits_are_the_same_for_any_cut() -> None:
    gradients = drawn()
    right = joint_norm(gradients, worlds=[], exact=True)
    for places in (2, 3, 4, 7):
        assert all(torch.equal(norm, right) for norm in spread(cut(gradients, places), exact=True))


def test_the_usual_bits_are_not() -> None:
    """Otherwise the test above would show nothing."""
    found = {float(spread(cut(drawn(), places), exact=False)[0]) for places in (2, 3, 4, 5, 7, 9)}
    assert len(found) > 1


@pytest.mark.parametrize("exact", [False, True])
def test_huge_finite_gradients_have_a_norm_and_others_none(exact: bool) -> None:
    big = [[torch.tensor([3e200], dtype=torch.float64)], [torch.tensor([4e200], dtype=torch.float64)]]
    assert all(abs(float(norm) / 5e200 - 1) < 1e-12 for norm in spread(big, exact=exact))
    tiny = [[torch.tensor([3e-320], dtype=torch.float64)], []]
    assert all(float(norm) < 1e-300 for norm in spread(tiny, exact=exact))
    for bad in (math.nan, math.inf, -math.inf):
        found = spread([[torch.tensor([1.0, bad])], [torch.ones(3)]], exact=exact)
        assert not any(math.isfinite(norm) for norm in found)


@pytest.mark.parametrize("exact", [False, True])
def test_nothing_and_zeros_are_zero_and_gradients_stay(exact: bool) -> None:
    assert float(joint_norm([], worlds=[], exact=exact)) == 0.0
    assert float(joint_norm([torch.zeros(3), torch.empty(0, 4)], worlds=[], exact=exact)) == 0.0
    kept = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert float(joint_norm([kept], worlds=[], exact=exact)) == 5.0
    assert kept.tolist() == [3.0, 4.0]


def test_a_run_s_norm_adds_the_pieces_of_all_ranks_and_counts_what_all_hold_once() -> None:
    """A weight cut over two tensor ranks, and a norm's weight that both hold: (3, 4, 12), of which 12 is on both."""
    cut, both = torch.tensor([3.0, 4.0]), torch.tensor([12.0])

    def rank(world: World) -> float:
        parts = {"weight": ShardSpec.from_ranges(torch.Size([2]), dim=0, ranges=[(world.rank, world.rank + 1)])}
        parts["norm"] = ShardSpec.full(torch.Size([1]))
        named = []
        for name, value in (("weight", parts["weight"].extract(cut)), ("norm", both)):
            parameter = nn.Parameter(torch.zeros_like(value))
            parameter.grad = value.clone()
            named.append(SimpleNamespace(name=name, parameter=parameter))
        held = [
            LocalTensor(name=n, shard_spec=p, dtype=torch.float32, get_tensor=lambda: torch.zeros(1))
            for n, p in parts.items()
        ]
        placed: Any = SimpleNamespace(optim_shards=ShardedTensors(world=world, tensors=held), named_parameters=named)
        placed.owned_parameters = lambda: ParallelizedModel.owned_parameters(placed)
        norm = updates._build_norm(placed, Settings(train=Train(max_grad_norm=1.0)), world=world)
        assert norm is not None
        return float(norm())

    worlds = thread_worlds(replicas=2, world=World.alone(), timeout_seconds=20)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, worlds)) == [13.0, 13.0]
