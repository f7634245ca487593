"""Load shards from safetensors files: each rank reads only the boxes of its shard specs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.parallel.initialization.meta_model import named_tensors
from paceline.parallel.module_access.shard_spec import ShardSpec, ShardSpecs

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class SafetensorsFolder:
    """The tensors of a folder with one file, or with several files and an index; each is read only on request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._file_by_tensor = self._find_files()

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._file_by_tensor)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return tuple(self._slice(name).get_shape())

    def read_tensor(self, name: str) -> Tensor:
        """Return one full tensor."""
        tensor: Tensor = self._open(self._file_by_tensor[name]).get_tensor(name)
        return tensor

    def read_shard(self, name: str, shard_spec: ShardSpec) -> Tensor:
        """Return one shard of a tensor."""
        assert shard_spec.local_shape is not None
        if not shard_spec.shape:
            return self.read_tensor(name)
        source = self._slice(name)
        box_values: list[Tensor] = [
            source[tuple(slice(start, start + size) for start, size in zip(box.full_offset, box.size, strict=True))]
            for box in shard_spec.boxes
        ]
        if len(box_values) == 1 and tuple(box_values[0].shape) == shard_spec.local_shape:
            return box_values[0]
        dtype = box_values[0].dtype if box_values else self._dtype(name)
        shard = torch.empty(shard_spec.local_shape, dtype=dtype)
        for box, value in zip(shard_spec.boxes, box_values, strict=True):
            box.view_local(shard).copy_(value)
        return shard

    def _dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = self._slice(name)[tuple(slice(0, 0) for _ in self.shape(name))].dtype
        return dtype

    def _slice(self, name: str) -> Any:
        return self._open(self._file_by_tensor[name]).get_slice(name)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.folder / file
            try:
                self._files[file] = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} can't be read: {error}.", hint="download or copy it again") from error
        return self._files[file]

    def _find_files(self) -> dict[str, str]:
        index = self.folder / INDEX
        if index.is_file():
            weight_map = _read_weight_map(index)
            missing_files = sorted({file for file in weight_map.values() if not (self.folder / file).is_file()})
            if missing_files:
                raise CheckpointError(
                    f"{self.folder} lacks {', '.join(missing_files[:3])}, which its index names.",
                    hint="copy the whole folder",
                )
            return {str(name): str(file) for name, file in weight_map.items()}
        if not (self.folder / SINGLE).is_file():
            examples = sorted(path.name for path in self.folder.glob("*"))[:6] if self.folder.is_dir() else []
            raise CheckpointError(
                f"{self.folder} contains neither {SINGLE} nor {INDEX}.",
                cause=f"it has {', '.join(examples)}" if examples else "the folder does not exist, or it is empty",
                hint="a folder that save_pretrained or `paceline ckpt consolidate` has written",
            )
        return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{index} can't be read: {type(error).__name__}: {error}.", hint="download or copy it again"
        ) from None
    return weight_map


class WeightSource(Protocol):
    """A rule that computes some of the model's tensors from tensors in the files."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the tensors that it computes, by the model's names."""

    @property
    def sources(self) -> Sequence[str]:
        """Return the names of the tensors in the files that it reads."""

    def read(self, folder: SafetensorsFolder, shard_specs: ShardSpecs) -> dict[str, Tensor]:
        """Return this rank's shards of the tensors that it computes."""


@dataclass(frozen=True, kw_only=True)
class CopiedTensor:
    """A tensor that is in the files unchanged, possibly under another name."""

    name: str
    source: str
    shape: tuple[int, ...]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of the one tensor."""
        return {self.name: self.shape}

    @property
    def sources(self) -> Sequence[str]:
        """Return the name of the one tensor in the files."""
        return [self.source]

    def read(self, folder: SafetensorsFolder, shard_specs: ShardSpecs) -> dict[str, Tensor]:
        """Return this rank's shard of the tensor."""
        return {self.name: folder.read_shard(self.source, shard_specs[self.name])}


WeightSourceFinder = Callable[[SafetensorsFolder], Sequence[WeightSource]]


def identity_weight_sources(folder: SafetensorsFolder) -> Sequence[WeightSource]:
    """Return one source for each tensor in files that use the model's names."""
    return [CopiedTensor(name=name, source=name, shape=folder.shape(name)) for name in folder.names]


def load_shards(
    model: nn.Module,
    *,
    shard_specs: ShardSpecs,
    folder: Path,
    find_weight_sources: WeightSourceFinder = identity_weight_sources,
    new: Sequence[str] = (),
    ignored: Callable[[str], bool] = lambda _: False,
) -> tuple[dict[str, Tensor], list[str]]:
    """Return this rank's shards of the tensors in the files, by the first name of each, and notes.

    Args:
        shard_specs: by first name; a tensor that is not listed is returned in full.
        new: prefixes of tensors that may be missing in the files.
        ignored: returns whether the model may lack a tensor of the files.

    Raises:
        CheckpointError: tensors are missing, unexpected, or of another shape; the message lists them.
    """
    weights, tensors = SafetensorsFolder(folder), named_tensors(model)
    first_names = _first_names(model, tensors)
    wanted_specs = {name: shard_specs.get(name, ShardSpec.full(tensor.shape)) for name, tensor in tensors.items()}
    chosen: list[WeightSource] = []
    file_shapes: dict[str, tuple[int, ...]] = {}
    unexpected: list[str] = []
    for source in find_weight_sources(weights):
        if not any(name in first_names for name in source.shapes):
            unexpected += [name for name in source.sources if not ignored(name)]
        elif not all(first_names.get(name) in file_shapes for name in source.shapes):
            file_shapes |= {first_names[name]: shape for name, shape in source.shapes.items() if name in first_names}
            chosen.append(source)
    missing = [n for n in _state_dict_names(model, tensors) if n not in file_shapes and not n.startswith(tuple(new))]
    mismatched = [
        f"{name} is {list(shape)} in the files and {list(tensors[name].shape)} in the model"
        for name, shape in file_shapes.items()
        if shape != tuple(tensors[name].shape)
    ]
    problems = {"missing: ": missing, "unexpected: ": unexpected, "": mismatched}
    if any(problems.values()):
        raise _mismatch_error(folder, problems)
    return _read_shards(weights, chosen, first_names, wanted_specs, tensors)


def _read_shards(
    folder: SafetensorsFolder,
    chosen: Sequence[WeightSource],
    first_names: Mapping[str, str],
    wanted_specs: ShardSpecs,
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], list[str]]:
    """Return this rank's shards from the chosen sources, cast to the model's dtypes, and notes on these casts."""
    values: dict[str, Tensor] = {}
    casts: dict[str, str] = {}
    for source in chosen:
        names = [
            name
            for name in source.shapes
            if name in first_names and wanted_specs[first_names[name]].local_shape is not None
        ]
        if not names:
            continue
        for name, value in source.read(folder, {name: wanted_specs[first_names[name]] for name in names}).items():
            dtype = tensors[first_names[name]].dtype
            if value.dtype != dtype:
                casts.setdefault(f"{str(value.dtype)[6:]} to {str(dtype)[6:]}", name)
            values[first_names[name]] = value.to(dtype)
    notes = [f"weights: cast from {kinds} while loading ({name}, ...)" for kinds, name in casts.items()]
    return values, notes


def _first_names(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a mapping from every name of a tensor to its first name."""
    by_id = {id(tensor): name for name, tensor in tensors.items()}
    all_names = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: by_id[id(tensor)] for name, tensor in all_names}


def _state_dict_names(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors in the state dict; other buffers are computed by the constructor."""
    listed = set(model.state_dict(keep_vars=True))
    return [name for name in tensors if name in listed]


def _mismatch_error(folder: Path, problems: Mapping[str, Sequence[str]]) -> CheckpointError:
    description = "; ".join(
        kind + ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        for kind, names in problems.items()
        if names
    )
    prefixes = list(dict.fromkeys(name.rpartition(".")[0] for name in problems["missing: "]))
    new_hint = f"new={prefixes[:4]} to initialise these freshly, or " if 0 < len(prefixes) <= 4 else ""
    return CheckpointError(
        f"the weights in {folder} do not fit this model: {description}.",
        cause="a different config, a different head, or different names",
        hint=f"{new_hint}the class that config.json names",
    )
