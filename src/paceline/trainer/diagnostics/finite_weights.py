"""Refuse to save weights that are not finite: the checkpoint would be useless, and would replace a good older one."""

import torch

from paceline.console.formatting import first_names
from paceline.errors import NonFiniteError
from paceline.parallel.module_access.tensor_access import local_elements
from paceline.step.optimizer_update import stored_values
from paceline.trainer.setup.build_training_setup import TrainingSetup


def refuse_nonfinite_weights(setup: TrainingSetup, *, step: int) -> None:
    """Refuse trained weights if some are not finite on at least one rank. Every rank must call this.

    The loss and the gradients of a step can be finite although its update is not.

    Raises:
        NonFiniteError: a weight is not finite; the error names the first parameters with such weights.
    """
    with torch.no_grad():
        values = {m.name: local_elements(stored_values(m.parameter)) for m in setup.update.named_parameters}
        # A sum is faster. It is not finite if a value is not, but it may also overflow.
        sums_are_finite = all(map(bool, [torch.isfinite(tensor.sum()) for tensor in values.values()]))
        checks = [] if sums_are_finite else [(name, torch.isfinite(v).all()) for name, v in values.items()]
    local_names = [name for name, is_finite in checks if not bool(is_finite)]
    nonfinite_names = list(dict.fromkeys(name for names in setup.world.gather_json(local_names) for name in names))
    if nonfinite_names:
        raise NonFiniteError(
            f"after step {step} weights are not finite: {first_names(nonfinite_names)}. They are not saved.",
            cause="a learning rate that is too high or not finite, or an optimizer that divides by zero",
            hint="older checkpoints are unchanged: use another lr= or lr_schedule=, or --train.max_grad_norm 1.0",
        )
