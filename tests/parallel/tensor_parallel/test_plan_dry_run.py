"""Tensor plans are derived from one process's values and checked function by function before the first step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import LayoutError
from paceline.parallel.tensor_parallel.auto_plan import choose_plan
from paceline.parallel.tensor_parallel.sharded_tensor import RULES, FunctionCall
from tests.parallel.tensor_parallel import tensor_parallel_models as models

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


class Deciding(nn.Module):
    """A pair of layers whose inner activation `decide` looks at."""

    def __init__(self, decide: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.up, self.down, self.decide = nn.Linear(6, 12), nn.Linear(12, 5), decide

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.decide(self.up(x).tanh()))


def _asserted(u: Tensor) -> Tensor:
    assert torch.isfinite(u).all(), "not finite"
    assert (u != 0).all() and not (u == 0).any() and u.isnan().logical_not().all(-1).all()
    return u


def _validated(u: Tensor) -> Tensor:
    if torch.any(u.abs() > 1.0) or not bool((u.abs() > 1e-6).all(dim=1, keepdim=True).all()):
        raise ValueError("out of range")
    return u


def _iterated(u: Tensor) -> Tensor:
    steps = 0
    while (u.square().amax(-1) > 1e-3).any():
        u, steps = u * 0.5, steps + 1
        assert steps < 20, "does not converge"
    return u


def _drawn(u: Tensor) -> Tensor:
    torch.distributions.Normal(u, u.abs() + 1.0)  # which checks that every scale is positive
    return u


def run(model: nn.Module) -> Any:
    return model(X.to(next(model.parameters()).dtype)).square().sum()


@pytest.mark.parametrize("decide", [_asserted, _validated])
def test_code_that_looks_at_values_is_planned_and_keeps_the_cut(decide: Callable[[Tensor], Tensor]) -> None:
    plan = choose_plan(Deciding(decide), ranks=3, run=run)
    assert {name: role.kind for name, role in plan.roles.items()} == {"up": "column", "down": "row"}
    models.check(lambda: Answering(decide), _answer, plan=plan, ranks=3)


@pytest.mark.parametrize(("decide", "reader"), [(_iterated, "amax"), (_drawn, "broadcast_tensors")])
def test_a_loop_that_ends_by_a_value_goes_as_often_as_in_one_process(decide: Any, reader: str) -> None:
    """No rule keeps the cut there, so the layer stays whole; with made-up values it would never end."""
    with pytest.raises(LayoutError, match="finds nothing to split") as caught:
        choose_plan(Deciding(decide), ranks=2, run=run)
    assert f"up.weight stays whole: {reader}" in caught.value.cause


def test_a_loss_that_looks_at_values_keeps_the_vocabulary_cut() -> None:
    def quiet(model: nn.Module) -> Any:
        out = model(models.ids()).logits
        assert torch.isfinite(out).all(), "logits are not finite"
        return F.cross_entropy(out.flatten(0, 1), models.ids().flatten())

    assert choose_plan(models.hugging_face("llama"), ranks=2, run=quiet).roles["lm_head"].kind == "head"


class Answering(Deciding):
    """With a loss beside its output, as the models wants it."""

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return models.Answer(loss=out.square().sum(), logits=out)


def _answer(model: nn.Module) -> Any:
    return model(X.to(next(model.parameters()).dtype))


def test_code_that_fails_on_cut_tensors_alone_is_told_that_tp_is_planned() -> None:
    def typed(u: Tensor) -> Tensor:
        assert type(u) is Tensor, "plain tensors only"
        return u

    with pytest.raises(LayoutError, match="own code fails while tp is being planned: AssertionError: plain tensors"):
        choose_plan(Deciding(typed), ranks=2, run=run)


def test_code_that_fails_in_one_process_too_fails_as_it_does_there() -> None:
    def failing(u: Tensor) -> Tensor:
        assert (u > 2.0).all(), "too small"
        return u

    with pytest.raises(AssertionError, match="too small"):
        choose_plan(Deciding(failing), ranks=2, run=run)


def _like(call: FunctionCall, local: Tensor) -> Any:
    x = call.values()[0]
    return type(x).from_local(local, x.sharding, x.group, origins=x.origins)


def test_a_rule_that_reads_a_call_wrongly_stops_the_run_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """`u.flip(0, 1)` with dimension 1 cut: turned within each piece, which no shape shows."""
    monkeypatch.setitem(RULES, "flip", lambda call: _like(call, call.values()[0].local.flip(0, 1)))
    with pytest.raises(
        LayoutError, match=r"flip on a tensor split by tp=2 gives values that differ .* \(rank 0\)"
    ) as caught:
        choose_plan(Deciding(lambda u: u.flip(0, 1)), ranks=2, run=run)
    assert "test_plan_dry_run.py" in caught.value.where


def test_a_sum_over_ranks_that_is_left_out_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "paceline.parallel.tensor_parallel.rules.matmul.reduce_from_parallel_region", lambda partial, wire: partial
    )
    with pytest.raises(LayoutError, match="linear on a tensor split by tp=2 gives values"):
        choose_plan(Deciding(torch.tanh), ranks=2, run=run)


def test_rounding_in_half_precision_is_no_mistake() -> None:
    for kind in (torch.bfloat16, torch.float16):
        choose_plan(models.hugging_face("llama").to(kind), ranks=2, run=models.text_run)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        choose_plan(models.hugging_face("bert"), ranks=2, run=models.text_run)


# -- vision


def _vision(name: str) -> nn.Module:
    import transformers as hf

    torch.manual_seed(3)
    if name == "swin":  # as its tiny ones: three heads at first, then six
        sizes: dict[str, Any] = {
            "embed_dim": 12,
            "depths": [1, 1],
            "num_heads": [3, 6],
            "window_size": 4,
            "num_labels": 10,
        }
        return hf.SwinForImageClassification(hf.SwinConfig(image_size=16, patch_size=2, **sizes, drop_path_rate=0.0))
    sizes = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2, "patch_size": 2, "num_labels": 10}
    return hf.ConvNextV2ForImageClassification(hf.ConvNextV2Config(**sizes))


def test_stages_whose_heads_do_not_divide_stay_whole_beside_those_that_do() -> None:
    plan = choose_plan(_vision("swin"), ranks=2, run=models.image_run)
    assert any("3 heads are not divisible by tp=2" in note for note in plan.notes)
    assert plan.roles["swin.encoder.layers.1.blocks.0.attention.q_proj"].heads == 6
    assert "swin.encoder.layers.0.blocks.0.attention.q_proj" not in plan.roles
    models.check(lambda: _vision("swin"), models.image_run, plan=plan)


def test_a_global_response_norm_is_cut() -> None:
    plan = choose_plan(_vision("convnextv2"), ranks=2, run=models.image_run)
    assert plan.roles["convnextv2.encoder.stages.*.layers.*.pwconv2"].kind == "row"
    models.check(lambda: _vision("convnextv2"), models.image_run, plan=plan)
