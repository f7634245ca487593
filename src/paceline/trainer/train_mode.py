"""Training mode from the first step on, as in a loop that calls `model.train()`."""

from collections.abc import Sequence

from torch import nn


def put_into_training(models: Sequence[nn.Module]) -> list[str]:
    """Call `train()` on each copy of a model, and return a warning about parts that `model=` had put into eval mode."""
    first = models[0]
    resting = [name for name, module in first.named_modules() if first.training and not module.training]
    for model in models:
        model.train()
    woken = next((name for name in resting if first.get_submodule(name).training), None)
    if woken is None:
        return []
    return [
        f"warning: model= returned {woken} in eval mode, and training sets it to train mode, as "
        "model.train() does; to keep it, "
        f"override train() of the model and call self.{woken}.eval() there"
    ]
