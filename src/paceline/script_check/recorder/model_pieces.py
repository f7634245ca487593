"""Pieces of a model: the elements of this process's parameters that each rank of another recording holds.

The pieces are found by their start values alone, so it does not matter along which dimension a script cuts a weight, in
what order it joins the parts, or how it calls them on a later stage of a pipeline. Weights that are constant at the
start, as those of a new norm, have no such values: their names and the pieces of their neighbours tell where they are.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paceline.script_check.recorder.tensor_print import bits_of, mix_bits, print_tensor
from paceline.script_check.recording import PiecePrint, TensorPrint, UnknownPiece

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # of splitmix64, as a signed number
Weights = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ModelPiece:
    """A parameter of a rank as elements of one of this process.

    `places` has the position of each element in the flattened parameter `own_name`, and -1 for padding, whose start
    values are `filling`; None if it is the whole parameter. `rows` are the rows along `dimension` that it has.
    """

    rank: int
    name: str
    own_name: str
    places: Tensor | None = None
    filling: Tensor | None = None
    dimension: int = 0
    rows: Tensor | None = None

    @property
    def num_padding(self) -> int:
        """The number of elements that this process's parameter lacks."""
        return 0 if self.places is None else int((self.places < 0).sum())

    def cut(self, tensor: Tensor, *, is_gradient: bool) -> Tensor:
        """Return the elements of this piece of a tensor of the whole parameter; a gradient of padding is zero."""
        if self.places is None:
            return tensor
        places = self.places.to(tensor.device)
        values = tensor.detach().reshape(-1)[places.clamp(min=0)]
        if self.filling is None:
            return values
        filling = torch.zeros_like(values) if is_gradient else self.filling.to(values)
        return torch.where(places < 0, filling, values)


class _OwnParameter:
    """A parameter of this process, and the positions of its rows and elements by their values."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._rows: dict[int, dict[int, int]] = {}

    def rows(self, dimension: int) -> dict[int, int]:
        """Return the number of each row by its key; rows that come several times have -1."""
        if dimension not in self._rows:
            found: dict[int, int] = {}
            for number, key in enumerate(_row_keys(self.tensor, dimension)):
                found[key] = -1 if key in found else number
            self._rows[dimension] = found
        return self._rows[dimension]

    @cached_property
    def elements(self) -> tuple[Tensor, Tensor]:
        """The sorted bits of the elements, and the position of each."""
        return torch.sort(bits_of(self.tensor.cpu()))


def find_pieces(own: Weights, ranks: Mapping[int, Weights]) -> tuple[list[ModelPiece], list[UnknownPiece]]:
    """Return where the parameters of the ranks are in this process's own, and those that are nowhere.

    Both are empty if the ranks hold no pieces: all have the same parameters as this process, and equal ones.
    """
    if not ranks or _are_replicas(own, ranks):
        return [], []
    parameters = {name: _OwnParameter(tensor.detach().cpu()) for name, tensor in own.items()}
    found: dict[tuple[int, str], ModelPiece] = {}
    waiting: list[tuple[int, str]] = []
    unknown = []
    for rank, weights in ranks.items():
        for name, tensor in weights.items():
            if _is_constant(tensor):
                waiting.append((rank, name))
                continue
            piece = _find_by_values(rank, name, tensor, parameters)
            if piece is None:
                unknown.append(UnknownPiece(rank=rank, name=name))
            else:
                found[rank, name] = piece
    for rank, name in waiting:
        piece = _find_constant(rank, name, ranks[rank][name], parameters, list(found.values()))
        if piece is not None:
            found[rank, name] = piece
    return list(found.values()), unknown


class PiecePrinter:
    """The summaries of the pieces of this process's parameters, if the ranks of another recording have pieces.

    `weights` are the parameters before the first step, and `ranks` those of the other recording by rank.
    """

    def __init__(self, weights: Weights, ranks: Mapping[int, Weights]) -> None:
        self._pieces, unknown = find_pieces(weights, ranks)
        self.unknown = tuple(unknown)
        self._gradients: list[TensorPrint | None] = [None] * len(self._pieces)

    def read_gradients(self, own: Weights, *, scale: float, eps: float) -> None:
        """Summarize the gradients of the parameters, times `scale`."""
        for number, each in enumerate(self._pieces):
            gradient = own[each.own_name].grad
            if gradient is not None and gradient.layout == torch.strided:
                self._gradients[number] = print_tensor(each.cut(gradient, is_gradient=True), scale=scale, eps=eps)

    def take(self, own: Weights) -> tuple[PiecePrint, ...]:
        """Return the pieces of the weights with those of the last gradients, and forget these."""
        gradients, self._gradients = self._gradients, [None] * len(self._pieces)
        return tuple(
            PiecePrint(
                rank=each.rank,
                name=each.name,
                own_name=each.own_name,
                num_padding=each.num_padding,
                gradient=gradient,
                weight=print_tensor(each.cut(own[each.own_name], is_gradient=False)),
            )
            for each, gradient in zip(self._pieces, gradients, strict=True)
        )


def _are_replicas(own: Weights, ranks: Mapping[int, Weights]) -> bool:
    """Return whether each rank has the same parameters as this process, with the same values on all ranks."""
    first = next(iter(ranks.values()))
    return all(
        weights.keys() == own.keys()
        and all(weights[name].shape == own[name].shape and torch.equal(weights[name], first[name]) for name in own)
        for weights in ranks.values()
    )


def _find_by_values(rank: int, name: str, tensor: Tensor, own: Mapping[str, _OwnParameter]) -> ModelPiece | None:
    """Return the piece with these values, first of the parameters with a similar name."""
    for own_name in sorted(own, key=lambda each: _similarity(each, name), reverse=True):
        whole = own[own_name].tensor
        if whole.shape == tensor.shape and torch.equal(whole, tensor):
            return ModelPiece(rank=rank, name=name, own_name=own_name)
    for own_name in sorted(own, key=lambda each: _similarity(each, name), reverse=True):
        parameter = own[own_name]
        if parameter.tensor.dim() != tensor.dim() or parameter.tensor.dtype != tensor.dtype:
            continue
        piece = _find_rows(rank, name, tensor, own_name, parameter) or (
            _find_elements(rank, name, tensor, own_name, parameter)
        )
        if piece is not None:
            return piece
    return None


def _find_rows(rank: int, name: str, tensor: Tensor, own_name: str, parameter: _OwnParameter) -> ModelPiece | None:
    """Return the piece if its rows along one dimension are rows of the parameter; constant rows may be padding."""
    whole = parameter.tensor
    for dimension in _cut_dimensions(tensor, whole):
        keys = _row_keys(tensor, dimension)
        counts = Counter(keys)
        rows = torch.tensor([parameter.rows(dimension).get(key, -1) if counts[key] == 1 else -1 for key in keys])
        if 2 * int((rows >= 0).sum()) >= len(rows) and _is_constant(tensor.movedim(dimension, 0)[rows < 0]):
            return _piece_of_rows(rank, name, tensor, own_name, whole, dimension, rows)
    return None


def _piece_of_rows(
    rank: int, name: str, tensor: Tensor, own_name: str, whole: Tensor, dimension: int, rows: Tensor
) -> ModelPiece:
    """Return the piece with these rows of a parameter; row -1 is padding."""
    positions = torch.arange(whole.numel()).view(whole.shape).movedim(dimension, 0)
    places = positions[rows.clamp(min=0)].clone()
    places[rows < 0] = -1
    has_padding = bool((rows < 0).any())
    return ModelPiece(
        rank=rank,
        name=name,
        own_name=own_name,
        places=places.movedim(0, dimension).reshape(-1),
        filling=tensor.detach().reshape(-1).clone() if has_padding else None,
        dimension=dimension,
        rows=rows,
    )


def _find_elements(rank: int, name: str, tensor: Tensor, own_name: str, parameter: _OwnParameter) -> ModelPiece | None:
    """Return the piece if each of its elements is one of the parameter, at whatever places."""
    values, positions = parameter.elements
    wanted = bits_of(tensor)
    if len(wanted) > len(values):
        return None
    at = torch.searchsorted(values, wanted).clamp(max=len(values) - 1)
    after = (at + 1).clamp(max=len(values) - 1)
    if not torch.equal(values[at], wanted) or bool(((values[after] == wanted) & (after > at)).any()):
        return None
    places = positions[at]
    if len(places.unique()) < len(places):
        return None
    return ModelPiece(rank=rank, name=name, own_name=own_name, places=places)


def _find_constant(
    rank: int, name: str, tensor: Tensor, own: Mapping[str, _OwnParameter], known: list[ModelPiece]
) -> ModelPiece | None:
    """Return the place of a parameter that is constant, from its name and from the pieces that are known.

    None if it is not known.
    """
    own_name = _renamed(rank, name, known)
    whole = own[own_name].tensor if own_name in own else None
    if whole is None or whole.dim() != tensor.dim() or not _is_constant(whole):
        return None
    if not tensor.numel() or not torch.equal(whole.reshape(-1)[:1], tensor.reshape(-1)[:1]):
        return None
    if whole.shape == tensor.shape:
        return ModelPiece(rank=rank, name=name, own_name=own_name)
    for dimension in _cut_dimensions(tensor, whole):
        length, size = tensor.shape[dimension], whole.shape[dimension]
        rows = next(_neighbour_rows(rank, own_name, length, size, own, known), None)
        if rows is None:
            chunk = next(_chunks(rank, own, known), None)
            rows = None if chunk is None else torch.arange(chunk * length, (chunk + 1) * length)
        if rows is not None and int(rows.max()) < size + length:
            return _piece_of_rows(rank, name, tensor, own_name, whole, dimension, torch.where(rows < size, rows, -1))
    return None


def _renamed(rank: int, name: str, known: list[ModelPiece]) -> str:
    """Return this process's name of a rank's parameter, as the parameters beside it are renamed."""
    prefix = name.rpartition(".")[0]
    while prefix:
        for each in known:
            if each.rank == rank and each.name.startswith(f"{prefix}."):
                rest = each.name.removeprefix(prefix)
                if each.own_name.endswith(rest):
                    return each.own_name.removesuffix(rest) + name.removeprefix(prefix)
        prefix = prefix.rpartition(".")[0]
    return name


def _neighbour_rows(
    rank: int, own_name: str, length: int, size: int, own: Mapping[str, _OwnParameter], known: list[ModelPiece]
) -> Iterator[Tensor]:
    """Yield the rows of pieces of the same module that are cut alike, as those of the weight are for a bias."""
    module = own_name.rpartition(".")[0]
    for each in known:
        is_near = each.rank == rank and each.own_name.rpartition(".")[0] == module
        if is_near and each.rows is not None and _has_rows(each, own, length, size):
            yield each.rows


def _has_rows(piece: ModelPiece, own: Mapping[str, _OwnParameter], length: int, size: int) -> bool:
    is_as_long = piece.rows is not None and len(piece.rows) == length
    return is_as_long and own[piece.own_name].tensor.shape[piece.dimension] == size


def _chunks(rank: int, own: Mapping[str, _OwnParameter], known: list[ModelPiece]) -> Iterator[int]:
    """Yield the number of the chunk that the rank holds of parameters that are cut into chunks in a row."""
    for each in known:
        if each.rank == rank and each.rows is not None:
            first, count = int(each.rows[0]), len(each.rows)
            is_range = bool((each.rows >= 0).all()) and int(each.rows[-1]) == first + count - 1
            if is_range and first % count == 0:
                yield first // count


def _cut_dimensions(tensor: Tensor, whole: Tensor) -> list[int]:
    """Return the dimensions along which a tensor may be cut out of the whole: all others have equal sizes."""
    if tensor.dim() != whole.dim():
        return []
    unequal = [number for number in range(tensor.dim()) if tensor.shape[number] != whole.shape[number]]
    return unequal if len(unequal) == 1 else [] if unequal else list(range(tensor.dim()))


def _row_keys(tensor: Tensor, dimension: int) -> list[int]:
    """Return a 64-bit number for each row along a dimension, from its bits and their places."""
    moved = tensor.movedim(dimension, 0).contiguous()
    rows = bits_of(moved).view(len(moved), -1)
    places = torch.arange(1, rows.size(1) + 1).expand_as(rows)
    keys: list[int] = mix_bits(rows * 3 + places * _GOLDEN).sum(dim=1).tolist()
    return keys


def _is_constant(tensor: Tensor) -> bool:
    """Return whether all elements are equal, or the only one is 0 or 1, as those of a new bias or norm."""
    flat = tensor.reshape(-1)
    if flat.numel() == 1:
        return float(flat[0]) in (0.0, 1.0)
    return not flat.numel() or bool((flat == flat[0]).all())


def _similarity(one: str, other: str) -> tuple[bool, int]:
    """Return how much two names have in common: equal ones first, then those that end alike."""
    count = 0
    for a, b in zip(reversed(one.split(".")), reversed(other.split(".")), strict=False):
        if a != b:
            break
        count += 1
    return one == other, count
