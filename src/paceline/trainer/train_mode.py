"""Set a model to training mode before the first step, as a loop that calls `model.train()` does."""

from collections.abc import Sequence

from torch import nn


def set_train_mode(models: Sequence[nn.Module]) -> list[str]:
    """Call `train()` on each copy of a model, and return a warning about a module that `model=` put into eval mode."""
    first_model = models[0]
    eval_modules = [
        name for name, module in first_model.named_modules() if first_model.training and not module.training
    ]
    for model in models:
        model.train()
    changed_module = next((name for name in eval_modules if first_model.get_submodule(name).training), None)
    if changed_module is None:
        return []
    return [
        f"warning: model= returned {changed_module} in eval mode, and training sets it to train mode, as "
        "model.train() does; to keep eval mode, "
        f"override train() of the model and call self.{changed_module}.eval() there"
    ]
