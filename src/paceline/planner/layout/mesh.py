"""Build the mesh of a layout: the ranks on each axis, the coordinates of each rank, and which sizes fit the ranks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from typing_extensions import override

from paceline.config.axis_counts import MAX_RANKS, REMAINING_RANKS
from paceline.config.layout import AXES, Layout, LayoutKind
from paceline.config.update_rule import UpdateRule
from paceline.console.formatting import plural
from paceline.errors import LayoutError, PacelineError

AXIS_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes whose sizes multiply to the number of ranks, outermost first."""
DATA_AXES = ("dp_replicate", "dp_shard")
"""The axes whose ranks process different samples."""
GRADIENT_AXES = ("dp_replicate", "dp_shard", "cp")
"""The axes over which gradients are summed."""
_MAX_NEAREST = 3


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The number of ranks on each axis."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """The number of ranks that share the experts. They are ranks of the data axes, so `ep` adds no ranks."""
    zero: int = 0
    """The ZeRO stage of `dp_shard`; 0 if nothing is sharded."""
    sites: int = 0
    """The number of local SGD sites, each on neighbouring ranks; 0 if all replicas take the same steps."""

    @property
    def ranks(self) -> int:
        """The total number of ranks."""
        return math.prod(self.size(axis) for axis in AXIS_ORDER)

    @property
    def order(self) -> tuple[str, ...]:
        """The axes, outermost first; with local SGD sites, `dp_replicate` is the outermost."""
        return ("dp_replicate", *(axis for axis in AXIS_ORDER if axis != "dp_replicate")) if self.sites else AXIS_ORDER

    @property
    def replicas(self) -> int:
        """The number of replicas, `dp_replicate` × `dp_shard`, each with its own samples."""
        return self.dp_replicate * self.dp_shard

    @cached_property
    def split_axes(self) -> tuple[str, ...]:
        """The axes of more than one rank, with `ep`."""
        return tuple(axis for axis in AXES if self.size(axis) > 1)

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        size: int = getattr(self, axis)
        return size

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate on each axis."""
        coordinates = {}
        for axis in reversed(self.order):
            rank, coordinates[axis] = divmod(rank, self.size(axis))
        return coordinates

    def group(self, rank: int, *, axes: Sequence[str]) -> tuple[int, ...]:
        """Return `rank` and all ranks whose coordinates differ from its own on these axes only, sorted."""
        coordinates, free_axes = self.coordinates(rank), [axis for axis in AXIS_ORDER if axis in axes]
        ranks = [rank - sum(self._strides[axis] * coordinates[axis] for axis in free_axes)]
        for axis in free_axes:
            ranks = [first + step * self._strides[axis] for first in ranks for step in range(self.size(axis))]
        return tuple(sorted(ranks))

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Return all groups of ranks along these axes; every rank is in exactly one group."""
        groups, grouped = list[tuple[int, ...]](), set[int]()
        for rank in range(self.ranks):
            if rank not in grouped:
                groups.append(self.group(rank, axes=axes))
                grouped.update(groups[-1])
        return groups

    @cached_property
    def _strides(self) -> dict[str, int]:
        """The distance between neighbouring ranks on each axis."""
        strides, stride = {}, 1
        for axis in reversed(self.order):
            strides[axis] = stride
            stride *= self.size(axis)
        return strides

    @override
    def __str__(self) -> str:
        """Return the axes that are split, e.g. `pp=2,dp_shard=2`."""
        return ",".join(f"{axis}={self.size(axis)}" for axis in self.split_axes) or "single"

    def as_json(self) -> dict[str, int]:
        """Return the fields, for plan.json."""
        return asdict(self)


_SYNCHRONOUS = UpdateRule()


def resolve_mesh(
    layout: Layout, *, ranks: int, problems: list[PacelineError], update: UpdateRule = _SYNCHRONOUS
) -> Mesh:
    """Return the mesh of a layout on `ranks` ranks; add errors to `problems`. Parameter servers are not counted."""
    if layout.kind is LayoutKind.THREADS:
        if layout.threads not in (None, ranks):
            text = f"{layout} needs {plural(layout.threads or 0, 'rank')}, you have {ranks}."
            problems.append(LayoutError(text, hint=f"--ranks {layout.threads}, or --layout threads={ranks}"))
        return Mesh(dp_replicate=ranks)
    if max(ranks, layout.ranks or 1) > MAX_RANKS:
        text = f"{max(ranks, layout.ranks or 1):,} ranks: at most {MAX_RANKS:,} are allowed."
        problems.append(LayoutError(text, cause="one digit too many", hint="--layout ddp --ranks 2"))
        return Mesh()
    sizes = {axis: layout.sizes.get(axis, 1) for axis in AXES}
    if layout.kind is LayoutKind.HSDP and "dp_replicate" not in layout.sizes:
        _set_hsdp_sizes(layout, sizes, ranks)
    product = math.prod(size for axis, size in sizes.items() if size != REMAINING_RANKS and axis != "ep")
    remaining_axis = next((axis for axis, size in sizes.items() if size == REMAINING_RANKS), None)
    if remaining_axis == "ep":
        sizes["ep"] = sizes["dp_replicate"] * sizes["dp_shard"]
        if sizes["ep"] == 1:
            # no data axis was given: the ranks that other axes leave become replicas, which share the experts
            sizes["dp_replicate"] = sizes["ep"] = max(1, ranks // product)
            product *= sizes["dp_replicate"]
    elif remaining_axis is not None:
        sizes[remaining_axis] = max(1, ranks // product)
        product *= sizes[remaining_axis]
    mesh = Mesh(**sizes, zero=layout.zero if sizes["dp_shard"] > 1 else 0)
    if product != ranks:
        problems.append(
            _misfit_with_servers_error(mesh, ranks, update)
            if update.servers
            else _misfit_error(layout, mesh, ranks, remaining_axis)
        )
    replicas = mesh.replicas
    if replicas % mesh.ep:
        hint = f"--layout dp_replicate={mesh.ep},ep={mesh.ep}"
        cause = "the ranks of ep are replicas, so ep must divide the number of replicas"
        problems.append(
            LayoutError(f"ep={mesh.ep} does not divide {plural(replicas, 'replica')}.", cause=cause, hint=hint)
        )
    return mesh


def layout_label(layout: Layout, mesh: Mesh) -> str:
    """Return the name of a layout in plans: its short name or its axes, and the options that are not the defaults."""
    requested_axes = [axis for axis in layout.sizes if axis != "ep"]
    is_only_data = {"dp_replicate", "dp_shard"}.issuperset(requested_axes)
    if layout.kind is not LayoutKind.AXES and is_only_data and len(requested_axes) <= 1:
        return ",".join([str(layout.kind), *layout.options()])
    names = {("dp_replicate",): "ddp", ("tp",): "tp", ("pp",): "pp", ("cp",): "cp", (): "single"}
    zero_names = {1: "zero1", 2: "zero2", 3: "fsdp"}
    name = zero_names[mesh.zero] if mesh.split_axes == ("dp_shard",) else names.get(mesh.split_axes, str(mesh))
    options = [option for option in layout.options() if not option.startswith("zero=") or name == str(mesh)]
    return ",".join([name, *options])


def nearest_meshes(mesh: Mesh, *, ranks: int) -> list[Mesh]:
    """Return at most three meshes of exactly `ranks` ranks that are most similar to `mesh`, the most similar first."""
    split_axes = [axis for axis in AXIS_ORDER if mesh.size(axis) > 1] or ["dp_replicate"]
    meshes = {str(other): other for other in _meshes_of_axes(split_axes, ranks, zero=mesh.zero)}
    wider_axes = list(dict.fromkeys([*split_axes, "dp_shard"]))
    meshes |= {str(other): other for other in _meshes_of_axes(wider_axes, ranks, zero=mesh.zero or 3)}
    return sorted(meshes.values(), key=lambda other: (_distance(mesh, other), str(other)))[:_MAX_NEAREST]


def _meshes_of_axes(axes: Sequence[str], ranks: int, *, zero: int) -> Iterator[Mesh]:
    """Yield all meshes of exactly `ranks` ranks that split no other axes than these."""
    for sizes in _factorizations(len(axes), ranks):
        sizes_by_axis = dict(zip(axes, sizes, strict=True))
        yield Mesh(**sizes_by_axis, zero=zero if sizes_by_axis.get("dp_shard", 1) > 1 else 0)


def _factorizations(num_factors: int, product: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of `num_factors` integers with this product."""
    if num_factors == 1:
        yield (product,)
        return
    for first in (n for n in range(1, product + 1) if product % n == 0):
        for rest in _factorizations(num_factors - 1, product // first):
            yield (first, *rest)


def _distance(one: Mesh, other: Mesh) -> float:
    """Return the distance between two meshes.

    It is the number of doublings and halvings of axes, plus 1 for each axis that only one of the meshes splits.
    """
    doublings = [abs(math.log2(one.size(axis) / other.size(axis))) for axis in AXIS_ORDER]
    changed_axes = [(one.size(axis) > 1) != (other.size(axis) > 1) for axis in AXIS_ORDER]
    return sum(doublings) + sum(changed_axes)


def _misfit_error(layout: Layout, mesh: Mesh, ranks: int, remaining_axis: str | None) -> PacelineError:
    """Return the error for a mesh that does not have `ranks` ranks.

    `remaining_axis` is the axis that should get all remaining ranks, if the layout has one.
    """
    product = " × ".join(f"{axis}={mesh.size(axis)}" for axis in mesh.split_axes if axis != "ep")
    nearest = nearest_meshes(mesh, ranks=ranks)
    nearest_text = " · ".join(map(str, nearest))
    if layout.kind is LayoutKind.SINGLE:
        return LayoutError(
            f"layout single is one process, you have {ranks} ranks.", hint=f"--layout ddp --ranks {ranks}"
        )
    if remaining_axis is not None:
        other_ranks = math.prod(mesh.size(axis) for axis in AXIS_ORDER if axis != remaining_axis)
        return LayoutError(
            f"{plural(ranks, 'rank')} are not divisible by {other_ranks}, the product of the other axes of {layout}.",
            cause=f"the nearest layouts that fit: {nearest_text}",
            hint=f"--layout {nearest[0]}, or --ranks {other_ranks * max(1, round(ranks / other_ranks))}",
        )
    return LayoutError(
        f"{product or layout} needs {plural(mesh.ranks, 'rank')}, you have {ranks}.",
        cause=f"the nearest layouts that fit: {nearest_text}",
        hint=f"--ranks {mesh.ranks}, or --layout {nearest[0]}",
    )


def _misfit_with_servers_error(mesh: Mesh, ranks: int, update: UpdateRule) -> PacelineError:
    """Return the error for a mesh that does not have `ranks` ranks, if other ranks are parameter servers."""
    servers = f"{update.servers} {'is a server' if update.servers == 1 else 'are servers'}"
    return LayoutError(
        f"{mesh} needs {plural(mesh.ranks, 'worker')}, you have {ranks}: of {ranks + update.servers} ranks {servers}.",
        cause="--ranks counts all processes",
        hint=f"--layout ddp --ranks {mesh.ranks + update.servers} --update {update}, or --layout dp_replicate={ranks}",
    )


def _set_hsdp_sizes(layout: Layout, sizes: dict[str, int], ranks: int) -> None:
    """Set `dp_replicate` for hsdp.

    The data ranks are the ranks divided by the sizes of the other axes. Without a size of `dp_shard`, `dp_replicate` is
    2, so that the training state is sharded over half of the data ranks. If there are fewer than four data ranks,
    `dp_shard` is also set to 2, and the caller then reports that the mesh does not fit.
    """
    other_ranks = math.prod(size for axis, size in sizes.items() if axis not in ("dp_replicate", "dp_shard", "ep"))
    data_ranks = ranks // max(other_ranks, 1)
    shard_size = layout.sizes.get("dp_shard", REMAINING_RANKS)
    sizes["dp_replicate"] = 2 if shard_size == REMAINING_RANKS else max(1, data_ranks // shard_size)
    if data_ranks < 4 and shard_size == REMAINING_RANKS:
        sizes["dp_shard"] = 2
