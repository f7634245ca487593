"""Tensor plans are derived for many models, written, read and refused by name; wrong plans show."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import JobError, LayoutError, PacelineError, Problems, UsageError
from paceline.parallel.tensor_parallel import sharded_tensor as split
from paceline.parallel.tensor_parallel.auto_plan import check_plan, choose_plan, derive_plan
from paceline.parallel.tensor_parallel.plan_toml import read_plan, write_plan
from paceline.parallel.tensor_parallel.rules import elementwise as rules_math
from paceline.parallel.tensor_parallel.rules import matmul as rules_product
from paceline.parallel.tensor_parallel.rules import views as rules_shape
from paceline.parallel.tensor_parallel.sharding import DimSharding, reshape_sharding, shard_evenly
from paceline.parallel.tensor_parallel.tensor_plan import ParameterRole, TensorPlan, resolve_plan
from tests.parallel.tensor_parallel import tensor_parallel_models as models

C, R = ParameterRole(kind="column"), ParameterRole(kind="row")


def fused(roles: Any, name: str) -> Any:
    return (roles[name].fused, roles[name].heads)


# -- derived


class ByHand(nn.Module):
    """The head written by hand on the embedding's weight, grouped queries, a scale on each head, tanh attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.token = nn.Embedding(53, 32)
        self.q, self.kv, self.o = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.scale, self.each = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(4, 1, 1))
        self.up, self.down = nn.Parameter(torch.randn(32, 40) / 6), nn.Parameter(torch.randn(40, 32) / 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids)
        b, t, c = x.shape
        q = self.q(x).view(b, t, 4, c // 4).transpose(1, 2) * self.scale
        k, v = (p.view(b, t, 2, c // 4).transpose(1, 2).repeat_interleave(2, 1) for p in self.kv(x).chunk(2, -1))
        shares = ((q @ k.transpose(-2, -1)) * self.each).softmax(-1)
        x = x + self.o((shares @ v).transpose(1, 2).contiguous().view(b, t, c))
        x = x + F.silu(x @ self.up) @ self.down
        return F.linear(x, self.token.weight)


def by_hand_run(model: nn.Module) -> Any:
    logits = model(models.ids())
    return models.Answer(F.cross_entropy(logits.view(-1, 53), models.ids().roll(1).view(-1)), logits)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_model_written_by_hand(sequence: bool) -> None:
    plan = derive_plan(ByHand(), run=by_hand_run, ranks=2)
    assert {n: (r.kind, r.dim) for n, r in plan.roles.items()} == {
        "token": ("embedding", None), "q": ("column", None), "kv": ("column", None), "o": ("row", None),
        "up": ("column", 1), "down": ("row", 0),
    }  # fmt: skip
    assert fused(plan.roles, "kv") == (2, 2)
    notes = models.check(ByHand, by_hand_run, sequence=sequence)
    assert sequence or not notes


class Norms(nn.Module):
    """BatchNorm between the two products of a pair: its statistics are of whole features, one after another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 4)
        self.between = {"batch": nn.BatchNorm1d(10), "layer": nn.LayerNorm(10)}[kind]
        self.pair = nn.Sequential(nn.Linear(4, 14), nn.ReLU(), nn.Linear(14, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(self.second(torch.relu(self.between(self.first(x)))))


@pytest.mark.parametrize("kind", ["batch", "layer"])
def test_what_needs_the_whole_keeps_its_weight_whole(kind: str) -> None:
    plan = derive_plan(Norms(kind), run=models.mlp_run, ranks=2)
    assert list(plan.roles) == ["second", "pair.0"]
    assert f"first.weight stays whole: {kind}_norm" in plan.notes
    models.check(lambda: Norms(kind), models.mlp_run)


def test_encoder_layers_of_torch_keep_their_attention_whole() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            layer = nn.TransformerEncoderLayer(6, 2, 20, 0.0, batch_first=True)
            self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x[None])

    models.check(Encoder, models.mlp_run)


def test_asked_to_stay_whole() -> None:
    make = lambda: models.hugging_face("llama")  # noqa: E731
    plan = derive_plan(make(), run=models.text_run, ranks=3, replicate=("model.layers.*.self_attn",))
    assert not any("self_attn" in name for name in plan.roles)
    models.check(make, models.text_run, ranks=3, plan=plan)
    own = choose_plan(make(), ranks=2, replicate=("model.layers.*.mlp",))
    assert all("mlp" not in n for n in resolve_plan(make(), own, ranks=2).by_name)
    models.check(make, models.text_run, plan=own)


# -- written and read


def test_a_plan_goes_through_its_file(tmp_path: Path) -> None:
    for kind in ("gpt2", "mixtral"):
        model = models.hugging_face(kind)
        plan = derive_plan(model, run=models.text_run, ranks=2)
        write_plan(plan, path=tmp_path / "plan.toml")
        assert read_plan(tmp_path / "plan.toml").roles == plan.roles
    text = (tmp_path / "plan.toml").read_text()
    assert '"model.layers.*.mlp.experts.gate_up_proj" = { role = "column", fused = 2 }' in text
    assert "# model.layers.*.mlp.gate.weight stays whole: topk" in text


@pytest.mark.parametrize(
    ("text", "says", "line"),
    [
        ('[roles]\n"a" = "colum"', "a: unknown role 'colum'", ":2"),
        ('[roles]\n\n"a" = { fused = 2 }', "is expected", ":3"),
        ('[roles]\n"a" = { role = "row", head = 2 }', "unknown key 'head'", ":2"),
        ('[roles]\n"a" = { role = "row", heads = "2" }', "heads = '2' is not int", ":2"),
        ('[roles]\n"a" = { role = "row", fused = 0 }', "not positive", ":2"),
        ('[roles]\n"a" = { role = "row", sections = [2, 0] }', "sections must be positive integers", ":2"),
        ('[roles]\n"a" = "row"\n[rolls]\nb = 1', "unknown table or key 'rolls'", ":3"),
        ('[roles]\n"a" = "row\n', "not TOML", "line 2"),
        ("", "names no module", "plan.toml"),
    ],
)
def test_a_wrong_file_is_told_with_its_line(tmp_path: Path, text: str, says: str, line: str) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        read_plan(tmp_path / "plan.toml")
    assert says in str(caught.value) and line in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no tensor plan"):
        read_plan(tmp_path / "plan.toml")


# -- refused


def said(work: Any) -> str:
    with pytest.raises(PacelineError) as caught:
        work()
    assert isinstance(caught.value, LayoutError | Problems)
    return str(caught.value)


def test_heads_that_do_not_divide() -> None:
    text = said(lambda: derive_plan(models.hugging_face("llama", num_attention_heads=4), run=models.text_run, ranks=3))
    assert "q_proj: 4 heads are not divisible by tp=3" in text and "tp=2" in text
    text = said(lambda: derive_plan(models.gpt(), run=models.gpt_run, ranks=3))
    assert "blocks.0.qkv: 4 heads are not divisible by tp=3" in text or "blocks.1.qkv: 4 heads" in text
    own = choose_plan(models.hugging_face("llama"), ranks=3)
    assert "q_proj.weight: 4 heads are not divisible by tp=3" in said(
        lambda: resolve_plan(models.hugging_face("llama"), own, ranks=3)
    )


def test_convolutions_alone() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    text = said(lambda: derive_plan(model, run=lambda m: m(torch.randn(2, 3, 8, 8)), ranks=2))
    assert "finds nothing to split in Sequential: 1 linear layers and 1 convolutions" in text


def test_bad_plans_by_name() -> None:
    tied = models.hugging_face("llama", tie_word_embeddings=True)
    two = TensorPlan(roles={"model.embed_tokens": ParameterRole(kind="embedding"), "lm_head": R})
    assert "lm_head.weight and model.embed_tokens.weight are one weight in two roles" in said(
        lambda: resolve_plan(tied, two, ranks=2)
    )
    mlp = models.Mlp()
    text = said(
        lambda: resolve_plan(
            mlp, TensorPlan(roles={"layers.0": ParameterRole(kind="column", fused=3), "layer.2": R}), ranks=2
        )
    )
    assert "layers.0.weight has 22 along dimension 0" in text and "'layer.2', but no module" in text
    text = said(lambda: resolve_plan(mlp, TensorPlan(roles={"layers.0": C}), ranks=23))
    assert "size 22 along dimension 0 is too small for tp=23" in text
    mlp.layers[0].weight = nn.Parameter(torch.zeros(22, 6, dtype=torch.int8), requires_grad=False)
    assert "layers.0.weight holds int8" in said(lambda: resolve_plan(mlp, TensorPlan(roles={"layers.0": C}), ranks=2))
    experts = models.hugging_face("mixtral")
    partly = TensorPlan(
        roles={"model.layers.*.mlp.experts": ParameterRole(kind="local"), "model.layers.*.mlp.experts.down_proj": R}
    )
    assert "gate_up_proj is whole in a module that runs on shards" in said(
        lambda: resolve_plan(experts, partly, ranks=2)
    )
    assert "has no tensor plan" in said(lambda: choose_plan(models.Mlp(), ranks=2))


def test_an_autograd_function_of_ones_own() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
            self.pair = nn.Sequential(nn.Linear(4, 14), nn.ReLU(), nn.Linear(14, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.pair(self.b(Double.apply(self.a(x))))

    plan = derive_plan(Own(), run=models.mlp_run, ranks=2)
    assert list(plan.roles) == ["b", "pair.0"]
    assert "a.weight stays whole: Double, a custom autograd function" in plan.notes
    models.check(Own, models.mlp_run)
    forced = TensorPlan(roles={"a": C, "b": R})
    assert "Double is a custom autograd function" in said(lambda: models.check(Own, models.mlp_run, plan=forced))


# -- planted


def red(make: Any, run: Any, **more: Any) -> dict[str, float]:
    with pytest.raises(AssertionError) as caught:
        models.check(make, run, **more)
    return caught.value.args[0] if isinstance(caught.value.args[0], dict) else {"": 1.0}


def test_a_bias_added_once_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rules_product.sum_partials

    def linear(call: Any) -> Any:
        x, weight, bias = call["input"], call["weight"], call["bias"]
        if isinstance(weight, rules_product.ShardPropagatingTensor) and weight.sharding.dim == 1 and bias is not None:
            own = rules_product.take_matching_shard(x, weight.sharding, -1, weight.group)
            return right(F.linear(own, weight.local, bias), weight.group)
        return rules_product._linear(call)

    monkeypatch.setitem(split.RULES, "linear", linear)
    red(models.Mlp, models.mlp_run)


def test_a_norm_whose_gradient_is_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "paceline.parallel.tensor_parallel.sharded_tensor.copy_to_parallel_region", lambda whole, wire: whole
    )
    red(lambda: models.hugging_face("llama"), models.text_run, sequence=True)


def test_layer_norms_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_math, "copy_to_parallel_region", lambda whole, wire: whole)
    red(lambda: models.hugging_face("bert"), models.text_run, sequence=True)


def test_heads_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two key-value heads on four ranks: each takes those that its queries belong to, here its neighbour's."""
    right = rules_product.take_local_shard

    def other(whole: Tensor, cut: DimSharding, wire: Any) -> Tensor:
        return right(
            whole,
            cut,
            type("Next", (), {"rank": (wire.rank + 1) % wire.size, "all_gather": wire.all_gather, "size": wire.size})(),
        )

    monkeypatch.setattr(rules_product, "take_local_shard", other)
    red(lambda: models.hugging_face("llama"), models.text_run, ranks=4)


def test_a_wrong_head_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view that gives each rank two heads of half the width: of the right size, and wrong."""
    right = rules_shape.reshape_sharded

    def wrong(x: Any, sizes: list[int], *more: Any) -> Any:
        found = right(x, sizes, *more)
        if found.local.shape[-2:] == (2, 8) and sizes[-1] in (8, -1):
            halved = found.local.reshape(*found.local.shape[:-2], 4, 4).transpose(-1, -2).reshape(found.local.shape)
            return rules_shape.wrap_like(x, halved, found.sharding)
        return found

    monkeypatch.setattr(rules_shape, "reshape_sharded", wrong)
    red(models.gpt, models.gpt_run)


def test_a_plan_that_is_wrong_about_fused_projections_is_right_and_slow() -> None:
    right = derive_plan(models.gpt(), run=models.gpt_run, ranks=2)
    for number in (1, 2):
        roles = {**right.roles, "blocks.*.qkv": ParameterRole(kind="column", fused=number)}
        notes = models.check(models.gpt, models.gpt_run, plan=TensorPlan(roles=roles))
        assert any("blocks.0.qkv" in note and "is gathered for" in note for note in notes)


def test_a_vocabulary_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank but the first looks up the row after the one that it should."""
    right = split.RULES["embedding"]

    def next_row(call: Any) -> Any:
        start, stop = call["weight"].sharding.ranges(call["weight"].group.rank)[0]
        mine = (call["input"] >= max(start, 1)) & (call["input"] < stop - 1)
        return right(replace(call, arguments=call.arguments | {"input": call["input"] + mine.long()}))

    monkeypatch.setitem(split.RULES, "embedding", next_row)
    apart = red(lambda: models.hugging_face("llama"), models.text_run)
    assert 1e-4 < apart["loss"] < 1.0 and 1e-2 < apart["gradients model.embed_tokens.weight"] < 10.0


def test_a_tie_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = models.split_model_in_group

    def split(model: nn.Module, **given: Any) -> Any:
        found = real(model, **given)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return found

    monkeypatch.setattr(models, "split_model_in_group", split)
    red(lambda: models.hugging_face("llama", tie_word_embeddings=True), models.text_run)


def test_check_plan_names_a_plan_that_changes_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.Mlp()
    plan = derive_plan(model, run=models.mlp_run, ranks=2)
    run = lambda m: m(torch.randn(3, 6, generator=torch.Generator().manual_seed(0)))  # noqa: E731
    assert check_plan(copy.deepcopy(model), plan=plan, run=run, ranks=2) < 1e-6
    monkeypatch.setattr(rules_product, "reduce_from_parallel_region", lambda partial, wire: partial)
    assert "changes output 0 of Mlp" in said(lambda: check_plan(model, plan=plan, run=run, ranks=2))


def test_check_plan_names_a_run_that_is_another_each_time() -> None:
    model = models.Mlp()
    plan = derive_plan(model, run=models.mlp_run, ranks=2)
    with pytest.raises(JobError, match="two calls of run with the same Mlp return different outputs"):
        check_plan(model, plan=plan, run=lambda m: m(torch.randn(3, 6)), ranks=2)


# -- cuts


def test_reshapes() -> None:
    three = shard_evenly(24, ranks=2, sections=(8, 8, 8), dim=1)
    found = reshape_sharding(three, (5, 24), (5, 3, 4, 2))
    assert isinstance(found, DimSharding) and (found.dim, found.sections) == (2, ((0, 2, 4),))
    assert reshape_sharding(found, (5, 3, 4, 2), (5, 24)) == three
    merged = reshape_sharding(shard_evenly(4, ranks=2, dim=1), (2, 4, 3), (8, 3))
    assert isinstance(merged, DimSharding) and merged.sections == ((0, 2, 4), (0, 2, 4))
    assert not isinstance(reshape_sharding(shard_evenly(24, ranks=2, dim=1), (5, 24), (5, 3, 8)), DimSharding)
    assert [shard_evenly(53, ranks=4).local_size(rank) for rank in range(4)] == [13, 13, 13, 14]
