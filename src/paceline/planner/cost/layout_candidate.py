"""Define a candidate: a layout with its microbatch size. The planner estimates it, and a user can type it."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from typing_extensions import override

from paceline.config.layout import AXES, Layout, LayoutKind
from paceline.planner.layout.mesh import Mesh, layout_label
from paceline.schedule.registry import find_schedule

MODEL_AXES = ("pp", "tp", "cp", "ep")
MICRO_BATCH_KEY = "micro_batch_size"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that a plan may recommend: the sizes of the axes, the options and the microbatch size."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 0
    """The ZeRO stage of `dp_shard`; 0 if nothing is sharded."""
    schedule: str = "1f1b"
    virtual: int = 1
    """The number of stages per rank."""
    micro_batch_size: int = 1
    """The samples of one forward of a replica."""
    remat: str = "none"
    offload: tuple[str, ...] = ()
    """The training state that is on the host: `optimizer`, `parameters` or both."""
    sequence: bool = False
    """Whether tp uses sequence parallelism."""
    params: str = "fp32"
    """The dtype in which fsdp gathers parameters."""
    precision: str = "fp32"
    """The precision of matmuls."""
    compiles: bool = False
    """Whether blocks are compiled."""

    @property
    def ranks(self) -> int:
        """The number of ranks, one per device."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def replicas(self) -> int:
        """The number of replicas, each with its own samples."""
        return self.dp_replicate * self.dp_shard

    def num_micro(self, global_batch_size: int) -> int:
        """Return the number of microbatches in a step, for the replica that has the most of them."""
        return num_micro(global_batch_size, replicas=self.replicas, micro_batch_size=self.micro_batch_size)

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of the candidate."""
        return Mesh(
            pp=self.pp, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, cp=self.cp, tp=self.tp, ep=self.ep,
            zero=self.zero,
        )  # fmt: skip

    @cached_property
    def layout_spec(self) -> Layout:
        """The layout that a user would type for this candidate."""
        sizes = {axis: self.mesh.size(axis) for axis in self.mesh.split_axes} or {"dp_replicate": 1}
        default_virtual = {"interleaved": 2, "breadth_first": 2, "zb_interleaved": 2}.get(self.schedule, 0)
        return Layout(
            kind=LayoutKind.AXES,
            sizes=sizes,
            zero=self.zero or 3,
            schedule=self.schedule if self.pp > 1 else "1f1b",
            virtual=self.virtual if default_virtual not in (0, self.virtual) else None,
            remat=self.remat,
            offload=self.offload,
            sequence=self.sequence,
            params=self.params,
        )

    @cached_property
    def layout(self) -> str:
        """The value to type after `--layout`."""
        text = layout_label(self.layout_spec, self.mesh)
        return text.replace("single,", "dp=1,", 1)

    def replace(self, **changes: Any) -> "Candidate":
        """Return a copy with some fields changed, like `dataclasses.replace` but ten times as fast."""
        copy = object.__new__(Candidate)
        values = vars(self)
        vars(copy).update({name: values[name] for name in _FIELDS}, **changes)
        return copy

    @cached_property
    def family(self) -> str:
        """The family of the layout, one of `FAMILIES`.

        It is the model axis that the layout splits, or `mixed` if the layout splits several. For a layout that splits
        none, it is the kind of data parallelism.
        """
        axes = [axis for axis, size in zip(MODEL_AXES, (self.pp, self.tp, self.cp, self.ep), strict=True) if size > 1]
        if axes:
            return axes[0] if len(axes) == 1 else "mixed"
        if self.dp_shard == 1:
            return "ddp" if self.dp_replicate > 1 else "single"
        return "hsdp" if self.dp_replicate > 1 else ("zero1", "zero2", "fsdp")[self.zero - 1]

    @override
    def __str__(self) -> str:
        """Return e.g. `fsdp,remat=full in microbatches of 2`."""
        return f"{self.layout} in microbatches of {self.micro_batch_size}{', compiled' * self.compiles}"


_FIELDS = tuple(field.name for field in fields(Candidate))


def candidate_from_layout(
    layout: Layout, mesh: Mesh, *, micro_batch_size: int, precision: str, compiles: bool = False
) -> Candidate:
    """Return the candidate of a layout that a user typed.

    If only some blocks are recomputed (`remat=every:N`), the candidate has no recomputation.
    """
    remat = layout.remat.partition(":")[0]
    return Candidate(
        **{axis: mesh.size(axis) for axis in AXES},
        zero=mesh.zero,
        schedule=find_schedule(layout.schedule).name if mesh.pp > 1 else "1f1b",
        virtual=(layout.virtual or find_schedule(layout.schedule).virtual) if mesh.pp > 1 else 1,
        micro_batch_size=micro_batch_size,
        remat="none" if remat == "every" else remat,
        offload=layout.offload,
        sequence=layout.sequence and mesh.tp > 1,
        params=layout.params if mesh.zero == 3 else "fp32",
        precision=precision,
        compiles=compiles,
    )


def num_micro(global_batch_size: int, *, replicas: int, micro_batch_size: int) -> int:
    """Return the number of microbatches in a step, for the replica that has the most of them.

    Microbatches are assigned to replicas round robin.
    """
    num_total = -(-global_batch_size // micro_batch_size)
    return -(-num_total // replicas)


FAMILIES = ("single", "ddp", "zero1", "zero2", "fsdp", "hsdp", "tp", "pp", "cp", "ep", "mixed")
"""The values of `Candidate.family`, the simplest first."""
