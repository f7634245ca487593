"""Training mode, from the first step on: a loop that calls `model.train()` begins in it too."""

from torch import nn


def put_into_training(model: nn.Module) -> list[str]:
    """Call `model.train()`; return what to say of modules that the job had put into eval mode, and that it wakes."""
    resting = [name for name, module in model.named_modules() if name and not module.training]
    was_training = model.training
    model.train()
    woken = [name for name in resting if model.get_submodule(name).training]
    if not (was_training and woken):
        return []
    first = woken[0]
    return [
        f"warning: model= gave {first} in eval mode, and training wakes it, as model.train() does; to keep it so, "
        f"override train() of the model and call self.{first}.eval() there"
    ]
