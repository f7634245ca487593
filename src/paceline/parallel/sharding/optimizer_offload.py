"""Keep optimizer state in host memory, and move it to the parameters' device only for the step."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def offload_state(optimizer: Optimizer) -> list[RemovableHandle]:
    """Register hooks that keep the optimizer's state in host memory between steps; return their handles."""
    return [
        optimizer.register_step_pre_hook(lambda stepped, *_: _move_state(stepped, to_host=False)),
        optimizer.register_step_post_hook(lambda stepped, *_: _move_state(stepped, to_host=True)),
    ]


def _move_state(optimizer: Optimizer, *, to_host: bool) -> None:
    for group in optimizer.param_groups:
        is_step_on_device = bool(group.get("fused") or group.get("capturable"))  # where the optimizer needs `step`
        for parameter in group["params"]:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor):
                    is_on_host = to_host or (key == "step" and not is_step_on_device)
                    state[key] = value.to("cpu" if is_on_host else parameter.device)
