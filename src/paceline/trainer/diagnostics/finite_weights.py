"""Refuse to save weights that are not finite: the checkpoint would be useless, and would replace a good older one."""

import torch

from paceline.console.formatting import first_names
from paceline.errors import NonFiniteError
from paceline.step.optimizer_update import stored_values
from paceline.trainer.setup.build_training_setup import TrainingSetup


def refuse_nonfinite_weights(setup: TrainingSetup, *, step: int) -> None:
    """Refuse trained weights if some are not finite on at least one rank. Every rank must call this.

    The loss and the gradients of a step can be finite although its update is not.

    Raises:
        NonFiniteError: a weight is not finite; the error names the first parameters with such weights.
    """
    with torch.no_grad():
        checks = [
            (m.name, torch.isfinite(stored_values(m.parameter)).all())
            for m in setup.update.named_parameters
            if m.parameter.numel()
        ]
    local_names = [name for name, is_finite in checks if not bool(is_finite)]
    nonfinite_names = list(dict.fromkeys(name for names in setup.world.gather_json(local_names) for name in names))
    if nonfinite_names:
        raise NonFiniteError(
            f"after step {step} weights are not finite: {first_names(nonfinite_names)}. They are not saved.",
            cause="a learning rate that is too high or not finite, or an optimizer that divides by zero",
            hint="older checkpoints are unchanged: use another lr= or lr_schedule=, or --train.max_grad_norm 1.0",
        )
