"""Check user hooks on parameters: a layout that replaces a parameter by another tensor can't call its hooks."""

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from paceline.console.formatting import first_names
from paceline.errors import JobError, LayoutError
from paceline.torch_internals.private_api import has_hooks

_CAUSE = "register_hook or register_post_accumulate_grad_hook on a parameter in model="


def find_hooked_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters with hooks, by name; call this before Paceline registers its own hooks."""
    return {name: parameter for name, parameter in model.named_parameters() if has_hooks(parameter)}


def hook_notes(hooked_names: Collection[str], *, divides_before_backward: bool) -> list[str]:
    """Return a warning about hooks on parameters if the gradient is divided by the sample count after backward."""
    if not hooked_names or divides_before_backward:
        return []
    return [
        f"warning: the hook on {first_names(list(hooked_names))} gets the gradient of one microbatch's loss sum, "
        "which is divided by the count later: a hook that masks or scales is right, one that clamps is not. "
        "count=lambda batch: ... divides before backward (docs/refusals.md)"
    ]


def refuse_hooks(tensors: Mapping[str, Tensor]) -> None:
    """Refuse hooks on the tensors of a model that is put on the meta device before it gets its values.

    Raises:
        JobError: a tensor has a hook; the message names it.
    """
    for name, tensor in tensors.items():
        if has_hooks(tensor):
            raise JobError(
                f"because the model is first put on the meta device, {name!r} is replaced by a new tensor, and the "
                "hook on the old tensor would never be called.",
                cause=_CAUSE,
                hint="--layout ddp or zero2, with an --init.limit above the size of the model, if each rank has the "
                "memory for it; or move the hook's work into loss=",
            )


def refuse_lost_hooks(
    hooked_parameters: Mapping[str, nn.Parameter], model: nn.Module, *, absent_names: Collection[str], layout: str
) -> None:
    """Refuse a layout that replaced a parameter with hooks by another tensor. Other ranks hold `absent_names`.

    Raises:
        LayoutError: a hooked parameter was replaced; the message names it.
    """
    parameters = dict(model.named_parameters())
    for name, parameter in hooked_parameters.items():
        if name not in absent_names and parameters.get(name) is not parameter:
            raise LayoutError(
                f"{layout} replaces {name} by a new tensor, and the hook on it would never be called.",
                cause=_CAUSE,
                hint="--layout zero2 or ddp, which keep parameters; or move the hook's work into loss= or optimizer=",
            )
