"""Checks for parts of a loss that are not in the model: modules and parameters that are not trained, sent or saved."""

from typing import Any

from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.console.formatting import first_names
from paceline.errors import JobError
from paceline.parallel.module_access.tensor_access import bits_checksum
from paceline.step.loss.modules_captured_by_loss import find_modules, find_parameters


def loss_notes(loss: Any, *, model: nn.Module, world: World) -> list[str]:
    """Return a warning if the loss has trainable parameters that are not the model's. Every rank must call this.

    Raises:
        JobError: a parameter or buffer of the loss differs between ranks, because each process drew its own values.
    """
    model_tensor_ids = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    parameters = {name: p for name, p in find_parameters(loss).items() if id(p) not in model_tensor_ids}
    buffers = {f"{path}.{n}": b for path, m in find_modules(loss) for n, b in m.named_buffers(recurse=False)}
    outside_tensors = {
        name: t for name, t in {**parameters, **buffers}.items() if id(t) not in model_tensor_ids and not t.is_meta
    }
    digests = world.gather_json({name: _digest(tensor) for name, tensor in outside_tensors.items()})
    differing = [
        name for name, value in digests[0].items() if any(rank_digests.get(name) != value for rank_digests in digests)
    ]
    if differing:
        raise JobError(
            f"loss= contains {first_names(differing)}, whose values differ between ranks.",
            cause="drawn when the job is built, which every process does separately",
            hint="put the loss's module into model=, which is equal on all ranks; or call "
            "torch.manual_seed(0) before building it",
        )
    untrained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if not untrained:
        return []
    return [
        "warning: loss= contains parameters that are not the model's and are not trained "
        f"({first_names(untrained)}): put "
        "the loss's module into model= to train them (docs/loss.md), or call requires_grad_(False) on them if they "
        "are not meant to be trained"
    ]


def _digest(tensor: Tensor) -> int:
    return int(bits_checksum(tensor.detach()))
