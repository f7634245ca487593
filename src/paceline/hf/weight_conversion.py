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
    """Tensors of the model that are computed from stored tensors: stacked experts, fused projections.

    `source_names` has the stored names by pattern of the `converter`; `shapes` has the shapes of the model's tensors by
    name.
    """

    converter: Any
    source_names: Mapping[str, Sequence[str]]
    target_name: str
    model: nn.Module
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def sources(self) -> Sequence[str]:
        """The names of all stored tensors that the conversion combines."""
        return [name for names in self.source_names.values() for name in names]

    def read(self, stored: SafetensorsFolder, parts: ShardSpecs) -> dict[str, Tensor]:
        """Read and combine the full stored tensors, then return this rank's parts."""
        converted = convert(self.converter, self.source_names, self.target_name, self.model, stored.read_tensor)
        return {name: parts[name].extract(converted[name]) for name in parts}


def convert(
    converter: Any,
    source_names: Mapping[str, Sequence[str]],
    target_name: str,
    model: nn.Module,
    read_tensor: Callable[[str], Tensor],
) -> dict[str, Tensor]:
    """Read the stored tensors, and return the model's tensors that transformers' `converter` computes from them."""
    new_converter = copy.deepcopy(converter)
    for pattern, names in source_names.items():
        new_converter.collected_tensors[pattern] = [read_tensor(name) for name in names]
    tensors = new_converter.convert(target_name, model=model, config=getattr(model, "config", None))
    return {name: value[0] if isinstance(value, list) else value for name, value in tensors.items()}


def weight_sources_for(model: nn.Module) -> Callable[[SafetensorsFolder], Sequence[WeightSource]]:
    """Return a function that finds the stored tensors for each tensor of the model in a folder.

    Without a conversion table (transformers before 5), names may differ only by the model's prefix.
    """
    try:
        rename = resolve(f"{_LOADING}:rename_source_key")
        converter_kind = resolve(f"{_LOADING}:WeightConverter")
        sort_key = resolve(f"{_LOADING}:dot_natural_key")
        conversion_table = list(resolve("transformers.conversion_mapping:get_model_conversion_mapping")(model))
    except UsageError:
        rename, converter_kind, sort_key, conversion_table = None, (), str, []
    converters = [entry for entry in conversion_table if isinstance(entry, converter_kind)]
    renamings = [entry for entry in conversion_table if not isinstance(entry, converter_kind)]
    model_tensors, prefix = model.state_dict(keep_vars=True), str(getattr(model, "base_model_prefix", ""))

    def find_target(name: str) -> tuple[str, str | None]:
        """Return the model's name for a stored tensor, and the pattern of its converter if it must be converted."""
        if rename is None:
            other_name = name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"
            return (name if name in model_tensors or other_name not in model_tensors else other_name), None
        renamed = rename(name, renamings, converters, prefix, model_tensors)
        if renamed[0] not in model_tensors and name in model_tensors:
            renamed = rename(name, [], [], base_model_prefix=prefix, meta_state_dict=model_tensors)
        return str(renamed[0]), renamed[1]

    def find_sources(stored: SafetensorsFolder) -> Sequence[WeightSource]:
        sources: list[WeightSource] = []
        groups: dict[str, dict[str, list[str]]] = {}  # stored names by name in the model and by pattern
        for name in sorted(stored.names, key=sort_key):
            new_name, pattern = find_target(name)
            if pattern is None:
                sources.append(CopiedTensor(name=new_name, source=name, shape=stored.shape(name)))
            else:
                groups.setdefault(new_name, {}).setdefault(pattern, []).append(name)
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        for target_name, source_names in groups.items():
            converter = by_pattern[next(iter(source_names))]
            meta_tensors = convert(
                converter, source_names, target_name, model, lambda name: torch.empty(stored.shape(name), device="meta")
            )
            shapes = {name: tuple(value.shape) for name, value in meta_tensors.items()}
            sources.append(
                ConvertedTensors(
                    converter=converter, source_names=source_names, target_name=target_name, model=model, shapes=shapes
                )
            )
        return sources

    return find_sources


def ignored_tensors(model: nn.Module, *, has_new_head: bool) -> Callable[[str], bool]:
    """Return a function that returns whether the stored tensor of a name is ignored.

    Ignored are the tensors that the model's class lists and, with `has_new_head`, all tensors outside the model's body.
    """
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])
    body_prefix = f"{getattr(model, 'base_model_prefix', '')}."

    def is_ignored(name: str) -> bool:
        return (has_new_head and not name.startswith(body_prefix)) or any(
            re.search(pattern, name) for pattern in patterns
        )

    return is_ignored
