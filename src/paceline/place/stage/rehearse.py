"""A cut tried out in one process: do the stages, one after another, give what the whole model gives?"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import LayoutError
from paceline.place.stage.cut import Cut
from paceline.place.stage.stages import Stages
from paceline.place.stage.values import Path, tensors_in
from paceline.streams import preserved

_ROUNDING = 1e-5


def rehearse(model: nn.Module, *, cut: Cut, call: Callable[[], Any]) -> None:
    """Run a whole model stage by stage on one example, without dropout and gradients, and compare. Costs two forwards.

    What other stages hold answers with NaN, so a value that is needed and does not cross shows itself.

    Raises:
        LayoutError: the last stage's result is not the whole model's.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with preserved(), torch.no_grad():
            right = dict(tensors_in(call()))
            stages = Stages(model, cut=cut, own=range(cut.num_stages))
            try:
                found: Any = None
                for index in range(cut.num_stages):
                    found = stages.run(index, found, call)
            finally:
                stages.close()
            _compare(right, dict(tensors_in(found)))
    finally:
        for module, mode in modes.items():
            module.training = mode


def _compare(right: dict[Path, Tensor], found: dict[Path, Tensor]) -> None:
    for path, whole in right.items():
        staged = found.get(path)
        name = f"the value at {'.'.join(map(str, path))}" if path else "the result"
        if staged is None or staged.shape != whole.shape:
            raise LayoutError(f"run by its stages, the model gives another structure than whole: {name} differs.")
        if not whole.is_floating_point():
            differs = not torch.equal(whole, staged)
        else:
            apart = (staged.double() - whole.double()).norm()
            differs = not bool(apart <= _ROUNDING * whole.double().norm()) and bool(whole.isfinite().all())
        if differs:
            missing = whole.is_floating_point() and bool(staged.isnan().any())
            raise LayoutError(
                f"run by its stages, the model gives another result than whole: {name} "
                + ("needs a value that an earlier stage has (it is NaN)." if missing else "differs."),
                cause="state that a forward leaves outside of its blocks' arguments and results",
                hint="hand it from block to block, or cut elsewhere with bounds=",
            )
