"""The conversion of a Hugging Face folder's tensors to the model's, by transformers' own conversion table."""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.parallel.initialization.safetensors_loading import CopiedTensor, SafetensorsFolder, WeightSource
from paceline.parallel.module_access.shard_spec import ShardSpecs
from paceline.plugins import resolve

_LOADING = "transformers.core_model_loading"


@dataclass(frozen=True, kw_only=True)
class ConvertedTensors:
    """Tensors whose stored form differs from the model's: separate experts, fused projections."""

    converter: Any
    gathered: Mapping[str, Sequence[str]]
    layer: str
    model: nn.Module
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def sources(self) -> Sequence[str]:
        """The names of all stored tensors that the conversion combines."""
        return [name for names in self.gathered.values() for name in names]

    def read(self, shelf: SafetensorsFolder, parts: ShardSpecs) -> dict[str, Tensor]:
        """Read and combine the full stored tensors, then return this rank's parts."""
        whole = convert(self.converter, self.gathered, self.layer, self.model, shelf.read_tensor)
        return {name: parts[name].extract(whole[name]) for name in parts}


def convert(
    converter: Any, gathered: Mapping[str, Sequence[str]], layer: str, model: nn.Module, get: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Convert the stored tensors with one of transformers' converters."""
    fresh = copy.deepcopy(converter)
    for pattern, names in gathered.items():
        fresh.collected_tensors[pattern] = [get(name) for name in names]
    found = fresh.convert(layer, model=model, config=getattr(model, "config", None))
    return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def recipes_for(model: nn.Module) -> Callable[[SafetensorsFolder], Sequence[WeightSource]]:
    """Return this model's conversions. Without a conversion table (transformers before 5), only a prefix is adapted."""
    try:
        rename = resolve(f"{_LOADING}:rename_source_key")
        converter_kind = resolve(f"{_LOADING}:WeightConverter")
        order = resolve(f"{_LOADING}:dot_natural_key")
        table = list(resolve("transformers.conversion_mapping:get_model_conversion_mapping")(model))
    except UsageError:
        rename, converter_kind, order, table = None, (), str, []
    converters = [entry for entry in table if isinstance(entry, converter_kind)]
    renamings = [entry for entry in table if not isinstance(entry, converter_kind)]
    own, prefix = model.state_dict(keep_vars=True), str(getattr(model, "base_model_prefix", ""))

    def target(name: str) -> tuple[str, str | None]:
        if rename is None:
            other = name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"
            return (name if name in own or other not in own else other), None
        found = rename(name, renamings, converters, prefix, own)
        if found[0] not in own and name in own:
            found = rename(name, [], [], base_model_prefix=prefix, meta_state_dict=own)
        return str(found[0]), found[1]

    def recipes(shelf: SafetensorsFolder) -> Sequence[WeightSource]:
        made: list[WeightSource] = []
        groups: dict[str, dict[str, list[str]]] = {}
        for name in sorted(shelf.names, key=order):
            new, pattern = target(name)
            if pattern is None:
                made.append(CopiedTensor(name=new, source=name, shape=shelf.shape(name)))
            else:
                groups.setdefault(new, {}).setdefault(pattern, []).append(name)
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        for layer, gathered in groups.items():
            converter = by_pattern[next(iter(gathered))]
            hollow = convert(
                converter, gathered, layer, model, lambda name: torch.empty(shelf.shape(name), device="meta")
            )
            shapes = {name: tuple(value.shape) for name, value in hollow.items()}
            made.append(
                ConvertedTensors(converter=converter, gathered=gathered, layer=layer, model=model, shapes=shapes)
            )
        return made

    return recipes


def ignored_by(model: nn.Module, *, other_head: bool) -> Callable[[str], bool]:
    """Return a predicate for stored tensors that the model ignores: listed by its class, or of another head."""
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])
    body = f"{getattr(model, 'base_model_prefix', '')}."

    def ignored(name: str) -> bool:
        return (other_head and not name.startswith(body)) or any(re.search(pattern, name) for pattern in patterns)

    return ignored
