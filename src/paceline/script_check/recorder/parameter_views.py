"""The parameters of a model as an optimizer has them: whole, a part of a flat tensor, or a copy in float32.

FSDP1 has flat parameters, and the optimizers of DeepSpeed's ZeRO and of hand-written mixed precision have other tensors
than the model. The recording has the names of the model's parameters in any case.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.script_check.recorder.own_gradients import flat_key
from paceline.script_check.recorder.tensor_print import Place
from paceline.script_check.recording import UNKNOWN_PARAMETER
from paceline.torch_internals.flat_parameters import find_flat_parameters
from paceline.verification.fingerprints.record import strip_wrapper_names

_FLAT_NAME = "_flat_param"  # of FSDP1
_MAPPING = "_hp_mapping"  # an attribute that DeepSpeed gives to the parameters of ZeRO 1 and 2


@dataclass(frozen=True, kw_only=True)
class ParameterView:
    """A parameter of the model in a tensor of the optimizer.

    `owner` is this tensor, `span` the start and end in it, if the parameter is only a part of it, and `place` where
    this part is in the parameter. `key` is that of `OwnGradients`.
    """

    name: str
    owner: Tensor
    key: Hashable
    span: tuple[int, int] | None = None
    place: Place = (None, None)

    @property
    def is_whole(self) -> bool:
        """True if this rank has the whole parameter."""
        return self.place[0] is None and not hasattr(self.owner, "placements")

    def select(self, tensor: Tensor) -> Tensor:
        """Return this parameter's part of the owner, or of the owner's gradient."""
        return tensor if self.span is None else tensor.reshape(-1)[self.span[0] : self.span[1]]


def view_parameters(
    parameters: Sequence[Tensor], names: Mapping[int, str], modules: Iterable[nn.Module], trained: Sequence[Tensor]
) -> list[ParameterView]:
    """Return the views of an optimizer's parameters.

    `names` has the names of these parameters and of `trained`, the ones with an own gradient, by their id; `modules`
    are the outermost modules that have them.
    """
    known = _flat_views(names, modules)
    unknown = [p for p in parameters if names[id(p)].startswith(UNKNOWN_PARAMETER) and id(p) not in known]
    if unknown:
        own_ids = {id(p) for p in parameters}
        sources = [p for p in trained if id(p) not in own_ids]
        known |= _partition_views(unknown, sources, names) or _copy_views(unknown, sources, names)
    return [
        view for p in parameters for view in known.get(id(p), [ParameterView(name=names[id(p)], owner=p, key=id(p))])
    ]


def _flat_views(names: Mapping[int, str], modules: Iterable[nn.Module]) -> dict[int, list[ParameterView]]:
    """Return the views of the original parameters of FSDP1, by the id of the optimizer's parameter."""
    views: dict[int, list[ParameterView]] = {}
    for parts in (parts for module in modules for parts in find_flat_parameters(module)):
        flat = parts.parameter
        prefix = names.get(id(flat), "").removesuffix(_FLAT_NAME)
        for number, piece in enumerate(parts.pieces):
            owner = flat if piece.original is None else piece.original
            if id(owner) not in names:
                continue
            place = _place(piece.start, piece.length, piece.numel) if parts.is_sharded else (None, None)
            end = piece.local_start + piece.length
            view = ParameterView(
                name=prefix + strip_wrapper_names(piece.name) if owner is flat else names[id(owner)],
                owner=owner,
                key=flat_key(flat, number),
                span=(piece.local_start, end) if owner is flat else None,
                place=place,
            )
            views.setdefault(id(owner), []).append(view)
    return views


def _partition_views(
    partitions: Sequence[Tensor], sources: Sequence[Tensor], names: Mapping[int, str]
) -> dict[int, list[ParameterView]]:
    """Return the views of the model's parameters in the flat partitions of DeepSpeed's ZeRO 1 and 2."""
    views: dict[int, list[ParameterView]] = {}
    for source in sources:
        if not hasattr(source, _MAPPING):
            continue
        owner, span, place = partitions[0], (0, 0), _place(0, 0, source.numel())  # another rank has it
        mapping: Any = getattr(source, _MAPPING)
        if mapping is not None:
            address = mapping.hp_fragment_address
            found = [p for p in partitions if _storage(p) == _storage(mapping.hp_fragment)]
            if not found:
                continue
            owner, span = found[0], (int(address.start), int(address.start + address.numel))
            place = _place(int(mapping.lp_fragment_address.start), int(address.numel), source.numel())
        view = ParameterView(name=names[id(source)], owner=owner, key=id(source), span=span, place=place)
        views.setdefault(id(owner), []).append(view)
    return views


def _copy_views(
    copies: Sequence[Tensor], sources: Sequence[Tensor], names: Mapping[int, str]
) -> dict[int, list[ParameterView]]:
    """Return the views of the model's parameters of which the optimizer has copies, as in float32.

    A copy is an attribute of the parameter, as in Megatron-LM, or has the same values before the first step.
    """
    views: dict[int, list[ParameterView]] = {}
    remaining = list(sources)
    for copy in (each for each in copies if each.grad is not None):
        alike = (p for p in remaining if p.shape == copy.shape and p.device == copy.device)
        source = next((p for p in alike if _is_copy(copy, p)), None)
        if source is not None:
            remaining = [p for p in remaining if p is not source]
            views[id(copy)] = [ParameterView(name=names[id(source)], owner=copy, key=id(source))]
    return views


def _is_copy(copy: Tensor, source: Tensor) -> bool:
    is_attribute = any(value is copy for value in vars(source).values())
    return is_attribute or torch.equal(copy.detach().to(source.dtype), source.detach())


def _place(start: int, length: int, numel: int) -> Place:
    return ((start, length),), (numel,)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
