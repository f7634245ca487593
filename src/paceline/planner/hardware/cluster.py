"""Describe a cluster: its devices, the links between them and its size, each with the source of the numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from typing_extensions import override

from paceline.config.from_json import convert_json


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of one rank. The field names are keys of plan.json."""

    name: str
    kind: str = "cuda"
    """`cuda` or `cpu`."""
    memory_bytes: float
    flops_per_second: Mapping[str, float]
    """The operations per second of dense matmuls, by precision."""
    bytes_per_second: float
    """The bandwidth of the device's memory."""
    reserve_bytes: float = 0.0
    """Bytes that are never available to the model.

    They hold the driver, the context, communication buffers and library workspaces.
    """
    watts: float | None = None
    """The power limit; None if it is unknown."""
    source: str = ""
    """The source of the numbers."""
    reserve_origin: str = "assumed"
    """`given` if the user set `reserve_bytes`, else `assumed`."""
    peaks: Mapping[str, float] = field(default_factory=dict)
    """The rates of the data sheet, by precision, if `flops_per_second` were measured; else empty."""

    @property
    def is_accelerator(self) -> bool:
        """True if the device has its own memory, separate from the host's."""
        return self.kind != "cpu"

    def rate(self, precision: str) -> float:
        """Return the operations per second in this precision, or in float32 if the device lacks the precision."""
        return self.flops_per_second.get(precision) or self.flops_per_second["fp32"]

    def peak(self, precision: str) -> float:
        """Return the operations per second by the data sheet, or `rate` if `peaks` does not have this precision."""
        return self.peaks.get(precision) or self.rate(precision)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between ranks. The field names are keys of plan.json."""

    name: str
    latency_seconds: float
    """The seconds until the first byte arrives."""
    bytes_per_second: float
    """The bandwidth in one direction."""
    is_shared: bool = False
    """True if all ranks of a node share one such link; False if each rank has its own."""
    source: str = ""
    """The source of the numbers, such as a data sheet."""
    origin: str = "assumed"
    """`measured`, `given` by the user, or `assumed` because the device is usually sold with this link."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of equal machines and its links. The field names are keys of plan.json."""

    device: Device
    nodes: int = 1
    """The number of machines."""
    devices: int = 1
    """The number of devices of one machine."""
    inside: Link
    """The link between devices of one machine."""
    between: Link
    """The link between machines."""
    host: Link
    """The link between a device and its host's memory."""
    host_bytes: float | None = None
    """The memory of one machine; None if it is unknown."""
    disk_bytes: float | None = None
    """The disk of one machine; None if it is unknown."""
    price_per_hour: float | None = None
    """The price of one machine, in `currency`; None if it is unknown."""
    currency: str = ""
    name: str = ""
    """The name in the cluster file, or `here` for this machine; empty for a cluster of the catalogue."""
    longer: Mapping[str, float] = field(default_factory=dict)
    """The ratio of measured to forecast step time in earlier runs on this machine, by family of layouts."""
    fuller: Mapping[str, float] = field(default_factory=dict)
    """The ratio of measured to forecast memory in earlier runs on this machine, by family of layouts."""

    @property
    def ranks(self) -> int:
        """The number of ranks, one per device."""
        return self.nodes * self.devices

    @override
    def __str__(self) -> str:
        """Return e.g. `4 × 8 × H100-80G`."""
        counts = [f"{count:,}" for count in (self.nodes, self.devices) if count > 1]
        return " × ".join([*counts, self.device.name])

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for plan.json; `cluster_from_json` reads them."""
        fields = asdict(self)
        fields["device"]["flops_per_second"] = dict(self.device.flops_per_second)
        fields["device"]["peaks"] = dict(self.device.peaks)
        return fields


def family_ratio(ratios: Mapping[str, float], family: str) -> float:
    """Return the ratio of measured values to forecasts of a family, or that of all runs (key ""), or 1."""
    return ratios.get(family) or ratios.get("") or 1.0


def cluster_from_json(stored: Mapping[str, Any]) -> Cluster:
    """Return the cluster that `Cluster.as_json` wrote."""
    return convert_json(stored, Cluster, part='"cluster"')


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group of ranks that communicate with each other."""

    size: int
    """The number of ranks."""
    latency_seconds: float = 0.0
    """The seconds of a collective of all ranks on almost no data."""
    bytes_per_second: float = 1.0
    """The bandwidth of a collective of all ranks."""
    hop_seconds: float = 0.0
    """The seconds of an empty message to a neighbour."""
    hop_bytes_per_second: float = 1.0
    """The bandwidth of a message to a neighbour."""

    def all_gather(self, num_bytes: float, *, calls: float = 1) -> float:
        """Return the seconds of `calls` all-gathers of `num_bytes` in total; a reduce-scatter takes the same time.

        A ring of n ranks sends (n - 1) / n of the bytes (Patarasuk and Yuan, 2009).
        """
        if self.size == 1:
            return 0.0
        return calls * self.latency_seconds + (self.size - 1) / self.size * num_bytes / self.bytes_per_second

    def all_reduce(self, num_bytes: float, *, calls: float = 1) -> float:
        """Return the seconds of `calls` all-reduces of `num_bytes` in total: reduce-scatters, then all-gathers."""
        return 2 * self.all_gather(num_bytes, calls=calls)

    def all_to_all(self, num_bytes: float, *, calls: float = 1) -> float:
        """Return the seconds of `calls` all-to-alls, which redistribute `num_bytes` of each rank in total.

        Each of n ranks sends (n - 1) / n of its bytes over its own link.
        """
        if self.size == 1:
            return 0.0
        return calls * self.latency_seconds + (self.size - 1) / self.size * num_bytes / self.hop_bytes_per_second

    def send(self, num_bytes: float) -> float:
        """Return the seconds of a message to a neighbour."""
        return 0.0 if self.size == 1 else self.hop_seconds + num_bytes / self.hop_bytes_per_second


def build_group(cluster: Cluster, axes: Sequence[tuple[int, int]], *, efficiency: float = 1.0) -> Group:
    """Return the group of the ranks along some axes.

    Each axis is a pair (stride, size): `size` ranks, of which neighbours are `stride` ranks apart. Messages reach the
    fraction `efficiency` of a link's bandwidth. Between nodes, each rank of the group uses its own link, so the
    bandwidths of a node add up. Latencies add up along a ring inside a node, and along a tree between nodes (NCCL's
    double binary trees).
    """
    size = ranks_per_node = 1
    for stride, count in axes:
        size *= count
        ranks_per_node *= max(1, min(count, cluster.devices // stride))
    inside, between = cluster.inside, cluster.between
    latency, rate = (ranks_per_node - 1) * inside.latency_seconds, inside.bytes_per_second
    hop_latency, hop_rate = inside.latency_seconds, rate
    if size > ranks_per_node:
        hop_latency = between.latency_seconds
        hop_rate = between.bytes_per_second / (cluster.devices if between.is_shared else 1)
        latency += (-(-size // ranks_per_node) - 1).bit_length() * between.latency_seconds
        rate = min(rate, hop_rate * ranks_per_node) if ranks_per_node > 1 else hop_rate
    return Group(
        size=size,
        latency_seconds=latency,
        bytes_per_second=rate * efficiency,
        hop_seconds=hop_latency,
        hop_bytes_per_second=hop_rate * efficiency,
    )
