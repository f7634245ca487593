"""Offload of optimizer state to host memory; it is on the parameters' device only during the step."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def offload_state(optimizer: Optimizer) -> list[RemovableHandle]:
    """Keep the optimizer's state in host memory between steps, and return the hook handles."""
    return [
        optimizer.register_step_pre_hook(lambda o, *_: _move(o, home=False)),
        optimizer.register_step_post_hook(lambda o, *_: _move(o, home=True)),
    ]


def _move(optimizer: Optimizer, *, home: bool) -> None:
    for group in optimizer.param_groups:
        counts_there = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor):
                    stays = home or (key == "step" and not counts_there)
                    state[key] = value.to("cpu" if stays else parameter.device)
