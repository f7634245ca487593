"""The model tensors that a server sends to its workers, and the digest that distinguishes models."""

import hashlib
from collections.abc import Sequence

from torch import Tensor, nn

from paceline.parallel.module_access.parameters import NamedParameter, trainable_parameters
from paceline.step.parameter_server.state import ServedWeights


def served_weights(model: nn.Module, named_parameters: Sequence[NamedParameter]) -> ServedWeights:
    """Return the tensors that a server sends to its workers; its optimizer updates `named_parameters`."""
    return ServedWeights(
        names=[member.name for member in named_parameters],
        weights=[member.parameter for member in named_parameters],
        fixed=fixed_tensors(model),
        digest=model_digest(model),
    )


def fixed_tensors(model: nn.Module) -> list[Tensor]:
    """Return the tensors that no update changes: frozen parameters and contiguous buffers."""
    trainable = {id(member.parameter) for member in trainable_parameters(model)}
    frozen = [parameter for parameter in model.parameters() if id(parameter) not in trainable]
    return [*frozen, *(buffer for buffer in model.buffers() if buffer.is_contiguous())]


def sparse_tables(model: nn.Module) -> dict[str, str]:
    """Return the trainable embedding tables with sparse gradients: the module name by the name of its weight."""
    tables = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    names = {id(m.weight): name for name, m in tables if m.sparse}
    return {
        member.name: names[id(member.parameter)]
        for member in trainable_parameters(model)
        if id(member.parameter) in names
    }


def model_digest(model: nn.Module) -> str:
    """Return a digest of the names, dtypes, shapes and `requires_grad` of all parameters and buffers."""
    descriptions = [
        (name, str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    return hashlib.blake2b(repr(descriptions).encode(), digest_size=16).hexdigest()
