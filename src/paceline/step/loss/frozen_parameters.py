"""A check that parameters which were frozen when the run was built stay frozen, because no optimizer has them."""

from collections.abc import Callable

from torch import nn

from paceline.errors import JobError


class FrozenParameters:
    """The parameters that were frozen when the run was built and must stay frozen.

    Other parameters may be frozen and unfrozen during the run.
    """

    def __init__(self, model: nn.Module) -> None:
        # for each parameter: its name, the parameters of its module, and its key there
        self._entries = [
            (f"{path}.{leaf}" if path else leaf, module._parameters, leaf)
            for path, module in model.named_modules()
            for leaf, parameter in module._parameters.items()
            if parameter is not None and not parameter.requires_grad
        ]

    @property
    def checks(self) -> list[Callable[[], None]]:
        """The checks that each step runs: none if the model has no frozen parameter."""
        return [self.refuse_unfrozen] if self._entries else []

    def refuse_unfrozen(self) -> None:
        """Raise an error if one of these parameters is trainable now.

        Raises:
            JobError: a parameter was unfrozen; the error names it.
        """
        for name, owner, leaf in self._entries:
            parameter = owner.get(leaf)
            if parameter is not None and parameter.requires_grad:
                raise JobError(
                    f"{name} was frozen when the run was built and is trainable now. No optimizer holds it.",
                    cause="requires_grad_(True) in the forward, in on_eval= or between two steps",
                    hint="build it trainable in model= and freeze it in the first forward, so "
                    "that you can unfreeze it later; or "
                    "save, unfreeze it in model=, and resume with --allow optimizer",
                )
