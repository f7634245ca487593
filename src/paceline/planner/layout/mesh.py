"""The mesh: the number of ranks on each axis, each rank's coordinates, and which products are legal."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from paceline.config.axis_counts import MOST_RANKS, REST
from paceline.config.layout import AXES, Layout, LayoutKind
from paceline.config.update_rule import UpdateRule
from paceline.console.formatting import plural
from paceline.errors import LayoutError, PacelineError

ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA = ("dp_replicate", "dp_shard")
SUMMED = ("dp_replicate", "dp_shard", "cp")
_MOST_NEAR = 3


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks per axis, outermost first; `ep` is carved out of the data axes and is no factor of its own.

    `zero` is the ZeRO stage of `dp_shard`, 0 if nothing is sharded. `sites` is how many replicas train on their own for
    a while, each on neighbouring ranks; 0 if all take the same step.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 0
    sites: int = 0

    @property
    def ranks(self) -> int:
        """The total number of processes."""
        return math.prod(self.size(axis) for axis in ORDER)

    @property
    def order(self) -> tuple[str, ...]:
        """The axes, outermost first."""
        return ("dp_replicate", *(axis for axis in ORDER if axis != "dp_replicate")) if self.sites else ORDER

    @property
    def replicas(self) -> int:
        """The number of coordinates of (`dp_replicate`, `dp_shard`): each gets other samples."""
        return self.dp_replicate * self.dp_shard

    @cached_property
    def split(self) -> tuple[str, ...]:
        """The axes that have more than one rank."""
        return tuple(axis for axis in AXES if self.size(axis) > 1)

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        found: int = getattr(self, axis)
        return found

    def place(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate on each axis."""
        found = {}
        for axis in reversed(self.order):
            rank, found[axis] = divmod(rank, self.size(axis))
        return found

    def group(self, rank: int, *, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from this one on these axes only, sorted."""
        own, free = self.place(rank), [axis for axis in ORDER if axis in axes]
        found = [rank - sum(self._strides[axis] * own[axis] for axis in free)]
        for axis in free:
            found = [first + step * self._strides[axis] for first in found for step in range(self.size(axis))]
        return tuple(sorted(found))

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Return all groups of these axes: every rank is in exactly one."""
        found, seen = list[tuple[int, ...]](), set[int]()
        for rank in range(self.ranks):
            if rank not in seen:
                found.append(self.group(rank, axes=axes))
                seen.update(found[-1])
        return found

    @cached_property
    def _strides(self) -> dict[str, int]:
        """The distance between neighbouring ranks on each axis."""
        found, stride = {}, 1
        for axis in reversed(self.order):
            found[axis] = stride
            stride *= self.size(axis)
        return found

    def __str__(self) -> str:
        """Return the axes that are split, e.g. `pp=2,dp_shard=2`."""
        return ",".join(f"{axis}={self.size(axis)}" for axis in self.split) or "single"

    def as_json(self) -> dict[str, int]:
        """Return its fields, for plan.json."""
        return asdict(self)


_SYNC = UpdateRule()


def mesh_of(layout: Layout, *, ranks: int, problems: list[PacelineError], update: UpdateRule = _SYNC) -> Mesh:
    """Return the mesh of a layout for this many ranks, without servers; misfits are added to `problems`."""
    if layout.kind is LayoutKind.THREADS:
        if layout.threads not in (None, ranks):
            text = f"{layout} needs {plural(layout.threads or 0, 'rank')}, you have {ranks}."
            problems.append(LayoutError(text, hint=f"--ranks {layout.threads}, or --layout threads={ranks}"))
        return Mesh(dp_replicate=ranks)
    if max(ranks, layout.ranks or 1) > MOST_RANKS:
        text = f"{max(ranks, layout.ranks or 1):,} ranks: at most {MOST_RANKS:,} are allowed."
        problems.append(LayoutError(text, cause="one digit too many", hint="--layout ddp --ranks 2"))
        return Mesh()
    sizes = {axis: layout.sizes.get(axis, 1) for axis in AXES}
    if layout.kind is LayoutKind.HSDP and "dp_replicate" not in layout.sizes:
        _hsdp(layout, sizes, ranks, problems)
    known = math.prod(size for axis, size in sizes.items() if size != REST and axis != "ep")
    open_axis = next((axis for axis, size in sizes.items() if size == REST), None)
    if open_axis == "ep":
        sizes["ep"] = sizes["dp_replicate"] * sizes["dp_shard"]
        if sizes["ep"] == 1:  # only `ep` was given: spread experts over replicas
            sizes["dp_replicate"] = sizes["ep"] = ranks
            known = ranks
    elif open_axis is not None:
        sizes[open_axis] = max(1, ranks // known)
        known *= sizes[open_axis]
    mesh = Mesh(**sizes, zero=layout.zero if sizes["dp_shard"] > 1 else 0)
    if known != ranks:
        problems.append(
            _unserved(mesh, ranks, update) if update.servers else _does_not_fit(layout, mesh, ranks, open_axis)
        )
    data = mesh.replicas
    if data % mesh.ep:
        hint = f"--layout dp_replicate={mesh.ep},ep={mesh.ep}"
        cause = "experts are split over ranks that see different samples"
        problems.append(LayoutError(f"ep={mesh.ep} does not divide {plural(data, 'replica')}.", cause=cause, hint=hint))
    return mesh


def layout_label(layout: Layout, mesh: Mesh) -> str:
    """Return a layout's name in plans and answers: its word or its axes, with options that differ from defaults."""
    own = [axis for axis in layout.sizes if axis != "ep"]
    if layout.kind is not LayoutKind.AXES and len(own) <= 1:
        return ",".join([str(layout.kind), *layout.options()])
    words = {("dp_replicate",): "ddp", ("tp",): "tp", ("pp",): "pp", ("cp",): "cp", (): "single"}
    zeros = {1: "zero1", 2: "zero2", 3: "fsdp"}
    word = zeros[mesh.zero] if mesh.split == ("dp_shard",) else words.get(mesh.split, str(mesh))
    options = [option for option in layout.options() if not option.startswith("zero=") or word == str(mesh)]
    return ",".join([word, *options])


def nearest_meshes(mesh: Mesh, *, ranks: int) -> list[Mesh]:
    """Return the legal meshes of this many ranks that are nearest to `mesh`, nearest first."""
    free = [axis for axis in ORDER if mesh.size(axis) > 1] or ["dp_replicate"]
    found = {str(other): other for other in _products(free, ranks, zero=mesh.zero)}
    wider = list(dict.fromkeys([*free, "dp_shard"]))
    found |= {str(other): other for other in _products(wider, ranks, zero=mesh.zero or 3)}
    return sorted(found.values(), key=lambda other: (_distance(mesh, other), str(other)))[:_MOST_NEAR]


def _products(axes: Sequence[str], ranks: int, *, zero: int) -> Iterator[Mesh]:
    for sizes in _factors(len(axes), ranks):
        found = dict(zip(axes, sizes, strict=True))
        yield Mesh(**found, zero=zero if found.get("dp_shard", 1) > 1 else 0)


def _factors(places: int, product: int) -> Iterator[tuple[int, ...]]:
    if places == 1:
        yield (product,)
        return
    for first in (n for n in range(1, product + 1) if product % n == 0):
        for rest in _factors(places - 1, product // first):
            yield (first, *rest)


def _distance(one: Mesh, other: Mesh) -> float:
    """Return the distance between two meshes; an axis that vanishes or appears counts twice."""
    steps = [abs(math.log2(one.size(axis) / other.size(axis))) for axis in ORDER]
    flips = [(one.size(axis) > 1) != (other.size(axis) > 1) for axis in ORDER]
    return sum(steps) + sum(flips)


def _does_not_fit(layout: Layout, mesh: Mesh, ranks: int, open_axis: str | None) -> PacelineError:
    product = " × ".join(f"{axis}={mesh.size(axis)}" for axis in mesh.split if axis != "ep")
    nearest = nearest_meshes(mesh, ranks=ranks)
    choice = " · ".join(map(str, nearest))
    if layout.kind is LayoutKind.SINGLE:
        return LayoutError(
            f"layout single is one process, you have {ranks} ranks.", hint=f"--layout ddp --ranks {ranks}"
        )
    if open_axis is not None:
        others = math.prod(mesh.size(axis) for axis in ORDER if axis != open_axis)
        return LayoutError(
            f"{plural(ranks, 'rank')} do not divide by the {others} ranks of the other axes of {layout}.",
            cause=f"nearest that fit: {choice}",
            hint=f"--layout {nearest[0]}, or --ranks {others * max(1, round(ranks / others))}",
        )
    return LayoutError(
        f"{product or layout} needs {plural(mesh.ranks, 'rank')}, you have {ranks}.",
        cause=f"nearest that fit: {choice}",
        hint=f"--ranks {mesh.ranks}, or --layout {nearest[0]}",
    )


def _unserved(mesh: Mesh, ranks: int, update: UpdateRule) -> PacelineError:
    """Return the error for a mesh that does not fit because some of the ranks are servers."""
    servers = f"{update.servers} {'is a server' if update.servers == 1 else 'are servers'}"
    return LayoutError(
        f"{mesh} needs {plural(mesh.ranks, 'worker')}, you have {ranks}: of {ranks + update.servers} ranks {servers}.",
        cause="--ranks counts all processes",
        hint=f"--layout ddp --ranks {mesh.ranks + update.servers} --update {update}, or --layout dp_replicate={ranks}",
    )


def _hsdp(layout: Layout, sizes: dict[str, int], ranks: int, problems: list[PacelineError]) -> None:
    """Set the sizes of hsdp: two replicas, each sharded over half the ranks, unless the layout says otherwise."""
    others = math.prod(size for axis, size in sizes.items() if axis not in ("dp_replicate", "dp_shard", "ep"))
    data = ranks // max(others, 1)
    shard = layout.sizes.get("dp_shard", REST)
    sizes["dp_replicate"] = 2 if shard == REST else max(1, data // shard)
    if data < 4 and shard == REST:
        sizes["dp_shard"] = 2
