"""Experts on several ranks give the outputs, gradients and weights of one process, and faults show."""

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.comm.rank_threads import run_simulated_ranks, thread_worlds
from paceline.errors import LayoutError
from paceline.parallel.expert_parallel import expert_parallel as experts
from paceline.parallel.expert_parallel import token_dispatch as experts_route
from paceline.parallel.expert_parallel.discovery import expert_ranges, find_experts
from paceline.parallel.expert_parallel.expert_parallel import RemoteExpert, split_experts
from paceline.parallel.expert_parallel.expert_parallel_check import check_experts
from paceline.parallel.expert_parallel.token_dispatch import combine, dispatch, plan_route
from paceline.parallel.module_access.shard_spec import ShardSpec
from tests.parallel.one_process_reference import (
    MIXTRAL,
    Listed,
    Mixture,
    Stacked,
    assert_experts,
    distance_experts,
    far_experts,
    objective,
    seeded,
    tokens,
    train_experts,
    transformer,
)


def expert_parts(model: nn.Module, *, rank: int, ranks: int, experts: str | None = None) -> dict[str, ShardSpec]:
    """Return the parts that `split_experts` would leave a rank, for a model that is still whole (e.g. on meta)."""
    parts: dict[str, ShardSpec] = {}
    for one in find_experts(model, pattern=experts):
        ranges = expert_ranges(one.num_experts, ranks=ranks)
        for name, parameter in one.module.named_parameters():
            fqn = f"{one.name}.{name}"
            if one.list_name is None:
                parts[fqn] = ShardSpec.from_ranges(parameter.shape, dim=0, ranges=[ranges[rank]])
            else:
                start, stop = ranges[rank]
                mine = start <= int(name.removeprefix(f"{one.list_name}.").split(".")[0]) < stop
                parts[fqn] = ShardSpec.full(parameter.shape) if mine else ShardSpec.empty(parameter.shape)
    return parts


@pytest.mark.parametrize(
    ("count", "ranks", "wanted"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (7, 3, [3, 2, 2]), (2, 3, [1, 1, 0]), (1, 1, [1])],
)
def test_experts_are_dealt_evenly(count: int, ranks: int, wanted: list[int]) -> None:
    ranges = expert_ranges(count, ranks=ranks)
    assert [stop - start for start, stop in ranges] == wanted and ranges[0][0] == 0 and ranges[-1][1] == count


def test_rows_reach_their_expert_with_their_weight_and_come_back() -> None:
    ranges = expert_ranges(3, ranks=2)
    chosen = [torch.tensor([[2, 0], [2, 1], [2, 0]]), torch.tensor([[2, 1]])]

    def one(over: World) -> Any:
        index = chosen[over.rank]
        flat = torch.arange(len(index) * 2.0).view(-1, 2) + 100 * over.rank
        weights = index + 0.5
        route = plan_route(index, ranges=ranges, world=over)
        rows, weight = dispatch(flat, weights, route=route)
        assert torch.equal(weight, (route.expert_index + ranges[over.rank][0]) + 0.5)
        home = combine(rows, like=flat, route=route)
        assert torch.equal(home, 2 * flat)  # each token had two choices
        return route.expert_index.tolist(), rows[:, 0].tolist()

    first, second = run_simulated_ranks(one, ranks=2)
    assert first == ([0, 0, 1, 1], [0.0, 4.0, 2.0, 100.0])
    assert second == ([0, 0, 0, 0], [0.0, 2.0, 4.0, 100.0])


@pytest.mark.parametrize("kind", [Stacked, Listed])
@pytest.mark.parametrize(
    ("count", "ranks", "favour", "sizes"),
    [
        (4, 2, (), (7, 5)),
        (5, 2, (), (7, 5)),  # an odd number of experts
        (5, 3, (), (7, 1, 9)),
        (4, 2, (0, 1), (7, 5)),  # the first rank's experts get every token, the second's none
        (4, 2, (3, 2), (7, 5)),
        (2, 3, (), (4, 4, 4)),  # a rank without experts
        (4, 2, (), (7, 0)),  # a rank without tokens
        (4, 2, (1,), (0, 3)),
    ],
)
def test_an_own_mixture(kind: Any, count: int, ranks: int, favour: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    model = seeded(lambda: Mixture(kind, count=count, favour=favour))
    assert_experts(model, tokens(*sizes), ranks=ranks)


@pytest.mark.parametrize(
    ("name", "experts", "ranks"),
    [
        (MIXTRAL, {"num_local_experts": 5}, 2),
        (MIXTRAL, {"num_local_experts": 2}, 3),
        (
            "Qwen3MoeForCausalLM/Qwen3MoeConfig",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
            2,
        ),
        ("OlmoeForCausalLM/OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 2, "eos_token_id": None}, 2),
    ],
)
def test_mixtures_of_transformers(name: str, experts: dict[str, Any], ranks: int) -> None:
    model = transformer(name, num_key_value_heads=2, **experts).model()
    assert_experts(model, tokens(*range(6, 6 + 2 * ranks, 2)), ranks=ranks)


def test_a_model_that_is_not_split_by_names_of_its_own() -> None:
    class Odd(Stacked):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            return super().forward(a, b, c)

    model = seeded(lambda: Mixture(Odd, count=4))
    with pytest.raises(LayoutError, match="Mixture has no experts to split"):
        find_experts(model)
    with pytest.raises(LayoutError, match="has no module 'nothing'"):
        find_experts(model, pattern="nothing")


def test_names_and_parts_are_those_of_the_whole() -> None:
    for kind in (Stacked, Listed):
        model = Mixture(kind, count=5)
        names = {name: p.shape for name, p in model.named_parameters()}
        planned = [expert_parts(model, rank=rank, ranks=2) for rank in range(2)]
        for rank in range(2):
            mine = seeded(lambda kind=kind: Mixture(kind, count=5))
            placed = split_experts(model=mine, world=thread_worlds(replicas=2)[rank])
            held = dict(mine.named_parameters())
            assert placed.shard_specs == planned[rank]
            assert {n for n in held if n.startswith("moe.")} == placed.names
            for name, part in placed.shard_specs.items():
                assert part.shape == names[name]
                assert (name in held) == (part.local_shape is not None)
                assert part.local_shape is None or held[name].shape == part.local_shape
        total = sum(sum(part.numel for part in parts.values()) for parts in planned)
        assert total == sum(p.numel() for n, p in model.named_parameters() if n.startswith("moe."))


def test_one_rank_changes_no_bit_of_an_output() -> None:
    model = seeded(lambda: Mixture(Stacked, count=4))
    ids = tokens(9)[0][0]
    wanted = model(ids)[0]
    placed = split_experts(model=model)
    assert torch.equal(model(ids)[0], wanted)
    placed.close()
    assert torch.equal(model(ids)[0], wanted) and placed.module_names == ("moe",)


class Loop(nn.Module):
    """What most people write first: experts called from the block, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        best = self.gate(x).argmax(-1)
        return torch.stack([self.experts[int(e)](row) for row, e in zip(x, best, strict=True)])


def test_experts_called_one_by_one_are_refused_with_the_line_to_type() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Loop())
    with pytest.raises(
        LayoutError, match=r"1\.experts \(ModuleList\) holds experts that are called one by one"
    ) as found:
        split_experts(model=model)
    assert "forward(self, tokens, expert_index, expert_weight)" in found.value.hint
    with pytest.raises(LayoutError, match=r"1 \(Loop\) holds experts that are called one by one"):
        split_experts(model=model, experts="1")
    mixed = nn.Sequential(Mixture(Stacked, count=4), Loop())
    with pytest.raises(LayoutError, match=r"1\.experts"):
        split_experts(model=mixed)


def test_what_else_is_refused() -> None:
    class Shared(Stacked):
        def __init__(self) -> None:
            super().__init__(4, 8)
            self.scale = nn.Parameter(torch.ones(8))

    with pytest.raises(LayoutError, match=r"moe \(Shared\) can't be split into experts: .*scale \(8,\)"):
        split_experts(model=nn.ModuleDict({"moe": Shared()}))
    tied = nn.ModuleDict({"a": Stacked(4, 8), "b": Stacked(4, 8)})
    tied["b"].weight = tied["a"].weight
    with pytest.raises(LayoutError, match=r"b\.weight and a\.weight are one parameter"):
        split_experts(model=tied)
    model = nn.ModuleDict({"moe": Stacked(4, 8)})
    split_experts(model=model)
    with pytest.raises(LayoutError, match=r"experts \(3, 2\) and weights \(3, 4\)"):
        model["moe"](torch.ones(3, 8), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 4))
    with pytest.raises(AssertionError, match="another rank"):
        RemoteExpert()(torch.ones(1, 8))


def test_the_check_passes_what_is_right_and_names_what_is_not() -> None:
    for model in (seeded(lambda: Mixture(Stacked, count=5)), transformer(MIXTRAL, num_key_value_heads=2).model()):
        before, drawn = {name: p.clone() for name, p in model.state_dict().items()}, torch.get_rng_state()
        model.register_forward_hook(lambda *_, of=model: of.__dict__.update(seen=torch.rand(1)))
        check_experts(model=model, batches=tokens(6, 9)[0], forward=lambda model, batch: model(batch))
        assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
        assert torch.equal(drawn, torch.get_rng_state()) and "seen" not in vars(model)

    class Limited(Stacked):
        """No expert takes more than three tokens."""

        def forward(self, tokens: Tensor, expert_index: Tensor, expert_weight: Tensor) -> Tensor:
            count = nn.functional.one_hot(expert_index.flatten(), self.num_experts).cumsum(0)
            over = count.gather(1, expert_index.flatten()[:, None]).view_as(expert_index) > 3
            return super().forward(tokens, expert_index, expert_weight.masked_fill(over, 0.0))

    class Apart(Stacked):
        """The same, with a mean over the tokens that it was given added to each."""

        def forward(self, tokens: Tensor, expert_index: Tensor, expert_weight: Tensor) -> Tensor:
            return super().forward(tokens, expert_index, expert_weight) + tokens.mean()

    for kind in (Limited, Apart):
        model = seeded(lambda kind=kind: Mixture(kind, count=4))
        with pytest.raises(LayoutError, match="with the experts of moe spread over ranks, the model's outputs differ"):
            check_experts(model=model, batches=tokens(6, 9)[0], forward=lambda model, batch: model(batch))


def test_the_check_refuses_what_experts_do_in_training_alone() -> None:
    class Dropping(Stacked):
        def forward(self, tokens: Tensor, expert_index: Tensor, expert_weight: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(tokens, expert_index, expert_weight), 0.1, self.training)

    class Limited(Stacked):
        def forward(self, tokens: Tensor, expert_index: Tensor, expert_weight: Tensor) -> Tensor:
            kept = expert_weight.clone()
            kept[3:] *= not self.training
            return super().forward(tokens, expert_index, kept)

    class Share(Stacked):
        """A capacity that is a share of the tokens, and weights that are nothing at the start."""

        def __init__(self, count: int, width: int) -> None:
            super().__init__(count, width)
            with torch.no_grad():
                self.weight.zero_()

        def forward(self, tokens: Tensor, expert_index: Tensor, expert_weight: Tensor) -> Tensor:
            count = nn.functional.one_hot(expert_index.flatten(), self.num_experts).cumsum(0)
            over = count.gather(1, expert_index.flatten()[:, None]).view_as(expert_index)
            over = over > expert_index.numel() / self.num_experts
            return super().forward(tokens, expert_index, expert_weight.masked_fill(over, 0.0))

    class Roomy(Stacked):
        """No expert takes more than twenty tokens, and the batch is smaller."""

        def forward(self, tokens: Tensor, expert_index: Tensor, expert_weight: Tensor) -> Tensor:
            count = nn.functional.one_hot(expert_index.flatten(), self.num_experts).cumsum(0)
            over = count.gather(1, expert_index.flatten()[:, None]).view_as(expert_index) > 20
            return super().forward(tokens, expert_index, expert_weight.masked_fill(over, 0.0))

    draws, others = "the experts of moe draw random numbers", "spread over ranks"
    for kind, says in ((Dropping, draws), (Limited, others), (Share, others), (Roomy, others)):
        model = seeded(lambda kind=kind: Mixture(kind, count=4))
        with pytest.raises(LayoutError, match=says):
            check_experts(model=model, batches=tokens(6, 9)[0], forward=lambda model, batch: model(batch))


def test_a_copy_routes_its_own_experts() -> None:
    model = seeded(lambda: Mixture(Stacked, count=4))
    split_experts(model=model)
    ids = tokens(9)[0][0]
    twin = copy.deepcopy(model)
    assert torch.equal(twin(ids)[0], model(ids)[0])
    with torch.no_grad():
        twin.moe.weight.zero_()
    assert not torch.equal(twin(ids)[0], model(ids)[0])


def test_a_hidden_expert_gets_nothing() -> None:
    """transformers marks a choice that is to be dropped with the number of experts."""
    module = seeded(lambda: Stacked(4, 8))
    index, weight = torch.tensor([[0, 4], [3, 1]]), torch.rand(2, 2)
    x = torch.randn(2, 8)
    wanted = module(x, index, weight)
    split_experts(model=(model := nn.ModuleDict({"moe": module})))
    assert torch.allclose(model["moe"](x, expert_index=index, expert_weight=weight), wanted, atol=1e-6)


class Counted:
    """A world that counts the elements it is handed."""

    def __init__(self, over: World) -> None:
        self.over, self.rank, self.world_size, self.elements = over, over.rank, over.world_size, 0
        self.is_simulated = over.is_simulated

    def all_to_all(self, rows: Tensor, *, send: Any, receive: Any) -> Tensor:
        self.elements += rows.numel()
        return self.over.all_to_all(rows, send=send, receive=receive)


def test_the_elements_exchanged_are_those_of_the_formula() -> None:
    count, choices, width, sizes = 5, 2, 16, (7, 4)
    start = seeded(lambda: Mixture(Stacked, count=count))
    data = tokens(*sizes)[0]

    def one(over: World) -> tuple[int, int]:
        model, counted = copy.deepcopy(start), Counted(over)
        split_experts(model=model, world=counted)  # type: ignore[arg-type]
        total = objective(model, data[over.rank])[0]
        forward = counted.elements
        total.backward()
        return forward, counted.elements - forward

    rows = [size * choices for size in sizes]
    found = run_simulated_ranks(one, ranks=2)
    there_and_back = sum(n * (width + 1) + n * width for n in rows)
    assert sum(forward for forward, _ in found) == there_and_back + 2 * count
    assert sum(backward for _, backward in found) == there_and_back


# -- mistakes that must show


def test_an_expert_s_gradient_added_twice_shows() -> None:
    model = seeded(lambda: Mixture(Stacked, count=4))
    assert_experts(model, tokens(7, 5), ranks=2)
    assert 1e-2 < distance_experts(model, tokens(7, 5), ranks=2, twice=True) < 1e2


def _swapped(index: Tensor, *, ranges: Any, world: World) -> Any:
    route = plan_route(index, ranges=ranges, world=world)
    return experts_route.TokenRoute(
        **{**vars(route), "send_counts": route.send_counts[::-1], "receive_counts": route.receive_counts[::-1]}
    )


def _unsorted(index: Tensor, *, ranges: Any, world: World) -> Any:
    route = plan_route(index, ranges=ranges, world=world)
    return experts_route.TokenRoute(**{**vars(route), "pair_index": route.pair_index.flip(0)})


def _off_by_one(index: Tensor, *, ranges: Any, world: World) -> Any:
    route = plan_route(index, ranges=ranges, world=world)
    return experts_route.TokenRoute(**{**vars(route), "expert_index": (route.expert_index + 1) % 2})


@pytest.mark.parametrize("fault", [_unsorted, _off_by_one])
def test_a_wrong_route_shows(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(lambda: Mixture(Stacked, count=4))
    monkeypatch.setattr(experts, "plan_route", fault)
    assert 1e-2 < distance_experts(model, tokens(7, 5), ranks=2) < 1e3


def test_a_route_that_sends_to_another_rank_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "plan_route", _swapped)
    with pytest.raises(AssertionError, match="received a different number of rows than this rank's route expects"):
        assert_experts(seeded(lambda: Mixture(Stacked, count=4)), tokens(7, 5), ranks=2)


def test_a_rank_without_rows_that_left_no_zero_gradient_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = seeded(lambda: Mixture(Stacked, count=4, favour=(0, 1))), tokens(7, 5)
    wanted = train_experts(model, data, None)
    honest = experts._JoinBackward.apply
    monkeypatch.setattr(experts._JoinBackward, "apply", lambda zeros, *rest: honest(False, *rest))
    with pytest.raises(AssertionError, match=r"moe\.weight"):  # which one process has a gradient of, and a rank none
        for found in run_simulated_ranks(lambda over: train_experts(model, data, over), ranks=2):
            assert far_experts(model, data, found, wanted) < 1e-12


class Alone:
    """The first of two ranks, to which the other sends what this one would."""

    rank, world_size = 0, 2

    def __init__(self, *, is_simulated: bool = False) -> None:
        self.is_simulated = is_simulated

    def all_to_all(self, rows: Tensor, *, send: Any, receive: Any) -> Tensor:
        return rows


def test_a_choice_of_no_expert_goes_nowhere() -> None:
    """Below all experts or above them: -1 and 4, as routers mark a token that is dropped."""
    index = torch.tensor([[3, -1], [4, 0], [-1, -1], [1, 3]])
    route = plan_route(index, ranges=[(0, 2), (2, 4)], world=cast("World", Alone()))
    assert route.pair_index.tolist() == [3, 6, 0, 7] and route.token_index.tolist() == [1, 3, 0, 3]
    assert (
        route.send_counts == (2, 2) and route.receive_counts == (2, 2) and route.expert_index.tolist() == [0, 1, 1, 1]
    )


def test_of_ranks_that_are_not_there_more_than_a_fair_share_comes() -> None:
    """Two standard deviations of a binomial draw, and on ranks that are there exactly what they send."""
    index = torch.arange(8).repeat(200).view(800, 2)  # 1,600 pairs on 8 experts, 4 of each rank's
    ranges = [(0, 4), (4, 8)]
    fair, unlucky = (
        plan_route(index, ranges=ranges, world=cast("World", Alone(is_simulated=flag))) for flag in (False, True)
    )
    assert sum(fair.receive_counts) == 1600 and fair.send_counts == unlucky.send_counts == (800, 800)
    assert sum(unlucky.receive_counts) == pytest.approx(1600 + 2 * (1600 / 2) ** 0.5, abs=8)
