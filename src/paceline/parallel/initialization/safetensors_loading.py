"""Loading of shards from safetensors files: each rank reads only the boxes of its shard specs."""

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
from paceline.parallel.module_access.shard_spec import Parts, ShardSpec

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class SafetensorsFolder:
    """The tensors of a folder with one file, or with several and an index; a tensor is read only on request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._where = self._found()

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return tuple(self._slice(name).get_shape())

    def whole(self, name: str) -> Tensor:
        """Return one full tensor."""
        found: Tensor = self._open(self._where[name]).get_tensor(name)
        return found

    def part(self, name: str, part: ShardSpec) -> Tensor:
        """Return one shard of a tensor."""
        assert part.local is not None
        if not part.shape:
            return self.whole(name)
        source = self._slice(name)
        pieces = [(box, source[tuple(slice(w, w + n) for w, n in zip(box.whole, box.size, strict=True))])
                  for box in part.boxes]  # fmt: skip
        if len(pieces) == 1 and tuple(pieces[0][1].shape) == part.local:
            only: Tensor = pieces[0][1]
            return only
        dtype = pieces[0][1].dtype if pieces else self._dtype(name)
        found = torch.empty(part.local, dtype=dtype)
        for box, piece in pieces:
            box.of_local(found).copy_(piece)
        return found

    def _dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = self._slice(name)[tuple(slice(0, 0) for _ in self.shape(name))].dtype
        return dtype

    def _slice(self, name: str) -> Any:
        return self._open(self._where[name]).get_slice(name)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.folder / file
            try:
                self._files[file] = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} can't be read: {error}.", hint="download or copy it again") from error
        return self._files[file]

    def _found(self) -> dict[str, str]:
        index = self.folder / INDEX
        if index.is_file():
            found = _weight_map(index)
            absent = sorted({file for file in found.values() if not (self.folder / file).is_file()})
            if absent:
                raise CheckpointError(
                    f"{self.folder} lacks {', '.join(absent[:3])}, which its index names.", hint="copy the whole folder"
                )
            return {str(name): str(file) for name, file in found.items()}
        if not (self.folder / SINGLE).is_file():
            has = sorted(path.name for path in self.folder.glob("*"))[:6] if self.folder.is_dir() else []
            raise CheckpointError(
                f"{self.folder} holds neither {SINGLE} nor {INDEX}.",
                cause=f"it has {', '.join(has)}" if has else "the folder does not exist, or it is empty",
                hint="a folder that save_pretrained or `paceline ckpt consolidate` has written",
            )
        return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{index} can't be read: {type(error).__name__}: {error}.", hint="download or copy it again"
        ) from None
    return found


class WeightSource(Protocol):
    """A rule that computes some of the model's tensors from tensors in the files."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the tensors that it computes, by the model's names."""

    @property
    def sources(self) -> Sequence[str]:
        """Return the names of the tensors in the files that it reads."""

    def read(self, shelf: SafetensorsFolder, parts: Parts) -> dict[str, Tensor]:
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

    def read(self, shelf: SafetensorsFolder, parts: Parts) -> dict[str, Tensor]:
        """Return this rank's shard of the tensor."""
        return {self.name: shelf.part(self.source, parts[self.name])}


Recipes = Callable[[SafetensorsFolder], Sequence[WeightSource]]


def as_they_are(shelf: SafetensorsFolder) -> Sequence[WeightSource]:
    """Return the rules for files whose tensors have the model's names."""
    return [CopiedTensor(name=name, source=name, shape=shelf.shape(name)) for name in shelf.names]


def load_into(
    model: nn.Module,
    *,
    parts: Parts,
    folder: Path,
    recipes: Recipes = as_they_are,
    new: Sequence[str] = (),
    ignored: Callable[[str], bool] = lambda _: False,
) -> tuple[dict[str, Tensor], list[str]]:
    """Return this rank's shards of the tensors in the files, by the first name of each, and notes.

    Args:
        parts: shard specs by first name; a tensor that is not listed is returned in full.
        new: prefixes of tensors that may be missing in the files.
        ignored: returns whether the model may lack a tensor of the files.

    Raises:
        CheckpointError: tensors are missing, unexpected, or of another shape; the message lists them.
    """
    shelf, tensors = SafetensorsFolder(folder), named_tensors(model)
    first = _first_names(model, tensors)
    wanted = {name: parts.get(name, ShardSpec.all_of(tensor.shape)) for name, tensor in tensors.items()}
    chosen: list[WeightSource] = []
    given: dict[str, tuple[int, ...]] = {}
    unexpected: list[str] = []
    for recipe in recipes(shelf):
        if not any(name in first for name in recipe.shapes):
            unexpected += [name for name in recipe.sources if not ignored(name)]
        elif not all(first.get(name) in given for name in recipe.shapes):
            given |= {first[name]: shape for name, shape in recipe.shapes.items() if name in first}
            chosen.append(recipe)
    missing = [n for n in _expected(model, tensors) if n not in given and not n.startswith(tuple(new))]
    others = [
        f"{name} is {list(shape)} in the files and {list(tensors[name].shape)} in the model"
        for name, shape in given.items()
        if shape != tuple(tensors[name].shape)
    ]
    problems = {"missing: ": missing, "unexpected: ": unexpected, "": others}
    if any(problems.values()):
        raise _unlike(folder, problems)
    return _read(shelf, chosen, first, wanted, tensors)


def _read(
    shelf: SafetensorsFolder,
    chosen: Sequence[WeightSource],
    first: Mapping[str, str],
    wanted: Parts,
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], list[str]]:
    found: dict[str, Tensor] = {}
    changed: dict[str, str] = {}
    for recipe in chosen:
        names = [name for name in recipe.shapes if name in first and wanted[first[name]].local is not None]
        if not names:
            continue
        for name, value in recipe.read(shelf, {name: wanted[first[name]] for name in names}).items():
            dtype = tensors[first[name]].dtype
            if value.dtype != dtype:
                changed.setdefault(f"{str(value.dtype)[6:]} to {str(dtype)[6:]}", name)
            found[first[name]] = value.to(dtype)
    notes = [f"weights: cast from {kinds} while loading ({name}, ...)" for kinds, name in changed.items()]
    return found, notes


def _first_names(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a mapping from every name of a tensor to its first."""
    by_id = {id(tensor): name for name, tensor in tensors.items()}
    all_names = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: by_id[id(tensor)] for name, tensor in all_names}


def _expected(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors in the state dict; other buffers are computed by the constructor."""
    listed = set(model.state_dict(keep_vars=True))
    return [name for name in tensors if name in listed]


def _unlike(folder: Path, problems: Mapping[str, Sequence[str]]) -> CheckpointError:
    told = "; ".join(
        kind + ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        for kind, names in problems.items()
        if names
    )
    prefixes = list(dict.fromkeys(name.rpartition(".")[0] for name in problems["missing: "]))
    fresh = f"new={prefixes[:4]} to initialise these freshly, or " if 0 < len(prefixes) <= 4 else ""
    return CheckpointError(
        f"the weights in {folder} do not fit this model: {told}.",
        cause="a different config, a different head, or different names",
        hint=f"{fresh}the class that config.json names",
    )
