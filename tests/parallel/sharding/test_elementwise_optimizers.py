"""The optimizers that are not tried on shards would pass the trial, and only they are left out."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import JobError
from paceline.parallel.sharding import shardability_check
from paceline.parallel.sharding.shardability_check import (
    ELEMENTWISE,
    merge_equal_groups,
    refuse_ignored_groups,
    refuse_optimizer_combining_parameters,
    shardability_error,
)

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"maximize": True}],
    "Adam": [{"amsgrad": True, "weight_decay": 0.1}, {"foreach": True}],
    "AdamW": [{"amsgrad": True}, {"maximize": True}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "Adagrad": [{"lr_decay": 0.1, "weight_decay": 0.1}],
}
CASES = [
    (kind, options)
    for kind in sorted(ELEMENTWISE, key=lambda kind: kind.__name__)
    for options in [{}, *OPTIONS.get(kind.__name__, [])]
]


def make_optimizer(kind: type[Optimizer], options: dict[str, Any]) -> Optimizer:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((4,), (4, 3), (4, 3, 2))]
    return kind(parameters, **{"lr": 0.1, **options})  # type: ignore[call-arg]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_what_is_not_tried_would_pass(
    kind: type[Optimizer], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shardability_check, "ELEMENTWISE", frozenset())
    optimizer = make_optimizer(kind, options)
    refuse_optimizer_combining_parameters(optimizer)
    refuse_ignored_groups(optimizer)
    (group,) = merge_equal_groups(optimizer)
    assert [shardability_error(optimizer, group, exact=False, dim=dim) for dim in (0, -1)] == ["", ""]


class WholeMatrixSgd(torch.optim.SGD):
    """A subclass that needs the norm of the whole gradient."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm() + 1e-6)
        super().step(closure)


class SharedScaleAdam(torch.optim.Adam):
    """A subclass in which the first gradient scales all of them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        scale = parameters[0].grad.norm()
        for parameter in parameters:
            parameter.grad.mul_(scale + 1.0)
        super().step(closure)


def test_a_subclass_is_tried() -> None:
    optimizer = make_optimizer(WholeMatrixSgd, {})
    (group,) = merge_equal_groups(optimizer)
    assert "on the two halves" in shardability_error(optimizer, group, exact=False, dim=0)
    with pytest.raises(JobError, match="updates a parameter differently"):
        refuse_optimizer_combining_parameters(make_optimizer(SharedScaleAdam, {"eps": 1.0}))


def test_exact_mode_tries_every_rule() -> None:
    """Equal values may still differ in a bit: the fused kernel of Adam does other arithmetic in a tensor's rest."""
    for kind in (torch.optim.Adafactor, *ELEMENTWISE):
        optimizer = make_optimizer(kind, {})
        (group,) = merge_equal_groups(optimizer)
        tried = []
        run_steps = shardability_check._run_steps
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shardability_check, "_run_steps", lambda *words: tried.append(1) or run_steps(*words))  # noqa: B023
            shardability_error(optimizer, group, exact=True, dim=0)
        assert tried, kind


def test_a_hook_of_all_optimizers_is_tried() -> None:
    """It may scale each gradient by the norm of a whole tensor."""

    def normalize(optimizer: Optimizer, _: Any, __: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm() + 1e-6)

    optimizer = make_optimizer(torch.optim.SGD, {})
    (group,) = merge_equal_groups(optimizer)
    assert shardability_error(optimizer, group, exact=False, dim=0) == ""
    handle = register_optimizer_step_pre_hook(normalize)
    try:
        assert "on the two halves" in shardability_error(optimizer, group, exact=False, dim=0)
    finally:
        handle.remove()
