"""List well-known accelerators and links, with the dense (not sparse) rates of their makers' data sheets.

Memory sizes are those of the data sheets. Some numbers are assumptions, because data sheets do not state them: the
memory that driver, context and communication use (`reserve_bytes`), the host memory, and the latencies. All numbers of
the device `cpu` and of the links `loopback` and `memory` are assumptions too.

A plan for this machine uses measured rates and a measured link instead (see `local_cluster`). It takes only the peak
rates of GPUs, for MFU, from this catalogue. Its reserve is also an assumption.
"""

from dataclasses import dataclass

from paceline.console.formatting import did_you_mean
from paceline.errors import PacelineError, UsageError
from paceline.planner.hardware.cluster import Cluster, Device, Link

_GIB = float(1 << 30)
_RESERVE = 2 * _GIB  # CUDA context about 0.5 GiB, NCCL 0.5 to 1 GiB, cuBLAS workspaces and driver
# host memory per device in machines with these links, such as DGX
_HOST_MEMORY_GIB = {"nvlink5": 256, "nvlink4": 256, "nvlink3": 128, "nvlink2": 64, "xgmi3": 64, "xgmi4": 256}
_TERA, _GIGA = 1e12, 1e9
_MICRO = 1e-6


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """A device with the links and the host memory of the machines in which it is usually sold."""

    device: Device
    host_bytes: float | None = None
    """The host memory for each device; None if it is unknown."""
    inside: str
    """The name of the link between the devices of a machine."""
    between: str
    """The name of the link between machines."""
    host: str
    """The name of the link between a device and its host's memory."""


def _gpu(
    name: str,
    memory: float,
    bandwidth: float,
    *,
    fp32: float,
    fp16: float,
    bf16: float | None,
    watts: float,
    source: str,
    links: tuple[str, str, str],
) -> CatalogEntry:
    """Return the entry of a GPU, from memory in GiB, bandwidth in GB/s and rates in TFLOP/s.

    `links` are the names of the links inside a node, between nodes, and to the host.
    """
    rates = {"fp32": fp32, "fp16": fp16} | ({"bf16": bf16} if bf16 else {})
    device = Device(
        name=name,
        memory_bytes=memory * _GIB,
        bytes_per_second=bandwidth * _GIGA,
        flops_per_second={precision: rate * _TERA for precision, rate in rates.items()},
        reserve_bytes=_RESERVE,
        watts=watts,
        source=source,
    )
    return CatalogEntry(
        device=device,
        inside=links[0],
        between=links[1],
        host=links[2],
        host_bytes=_HOST_MEMORY_GIB.get(links[0], 64) * _GIB,
    )


_USUAL_LINKS = {  # inside a node, between nodes, to the host
    "A100": ("nvlink3", "ib-hdr", "pcie4"),
    "H100": ("nvlink4", "ib-ndr", "pcie5"),
    "B200": ("nvlink5", "ib-ndr", "pcie5"),
    "V100": ("nvlink2", "ib-hdr", "pcie3"),
    "PCIE5": ("pcie5", "ib-ndr", "pcie5"),
    "PCIE4": ("pcie4", "eth-100g", "pcie4"),
    "PCIE3": ("pcie3", "eth-10g", "pcie3"),
    "MI250X": ("xgmi3", "ib-hdr", "pcie4"),
    "MI300X": ("xgmi4", "ib-ndr", "pcie5"),
}

_ENTRIES = (
    _gpu("A100-40G", 40, 1555, fp32=19.5, fp16=312, bf16=312, watts=400,
         source="NVIDIA A100 Tensor Core GPU data sheet, 40GB SXM",
         links=_USUAL_LINKS["A100"]),
    _gpu("A100-80G", 80, 2039, fp32=19.5, fp16=312, bf16=312, watts=400,
         source="NVIDIA A100 Tensor Core GPU data sheet, 80GB SXM",
         links=_USUAL_LINKS["A100"]),
    _gpu("H100-80G", 80, 3350, fp32=67, fp16=989.5, bf16=989.5, watts=700,
         source="NVIDIA H100 Tensor Core GPU data sheet, SXM: 1,979 with sparsity, half of it dense",
         links=_USUAL_LINKS["H100"]),
    _gpu("H100-80G-PCIE", 80, 2000, fp32=51, fp16=756.5, bf16=756.5, watts=350,
         source="NVIDIA H100 Tensor Core GPU data sheet, PCIe: 1,513 with sparsity, half of it dense",
         links=_USUAL_LINKS["PCIE5"]),
    _gpu("H200", 141, 4800, fp32=67, fp16=989.5, bf16=989.5, watts=700,
         source="NVIDIA H200 Tensor Core GPU data sheet, SXM: 1,979 with sparsity, half of it dense",
         links=_USUAL_LINKS["H100"]),
    _gpu("B200", 180, 7700, fp32=75, fp16=2250, bf16=2250, watts=1000,
         source="NVIDIA HGX B200 data sheet, an eighth of the board: 36 PFLOPS with sparsity, half dense",
         links=_USUAL_LINKS["B200"]),
    _gpu("L4", 24, 300, fp32=30.3, fp16=121, bf16=121, watts=72,
         source="NVIDIA L4 Tensor Core GPU data sheet: 242 with sparsity, half of it dense",
         links=_USUAL_LINKS["PCIE4"]),
    _gpu("L40S", 48, 864, fp32=91.6, fp16=362, bf16=362, watts=350,
         source="NVIDIA L40S data sheet: 362.05 dense",
         links=_USUAL_LINKS["PCIE4"]),
    _gpu("V100-16G", 16, 900, fp32=15.7, fp16=125, bf16=None, watts=300,
         source="NVIDIA V100 Tensor Core GPU data sheet, SXM2 16GB",
         links=_USUAL_LINKS["V100"]),
    _gpu("V100-32G", 32, 900, fp32=15.7, fp16=125, bf16=None, watts=300,
         source="NVIDIA V100 Tensor Core GPU data sheet, SXM2 32GB",
         links=_USUAL_LINKS["V100"]),
    _gpu("T4", 16, 300, fp32=8.1, fp16=65, bf16=None, watts=70,
         source="NVIDIA T4 Tensor Core GPU data sheet",
         links=_USUAL_LINKS["PCIE3"]),
    _gpu("RTX-3090", 24, 936, fp32=35.6, fp16=71, bf16=71, watts=350,
         source="NVIDIA Ampere GA102 GPU architecture whitepaper: tensor cores adding in float32",
         links=_USUAL_LINKS["PCIE4"]),
    _gpu("RTX-4090", 24, 1008, fp32=82.6, fp16=165.2, bf16=165.2, watts=450,
         source="NVIDIA Ada GPU architecture whitepaper: tensor cores adding in float32",
         links=_USUAL_LINKS["PCIE4"]),
    _gpu("MI250X", 64, 1638, fp32=47.9, fp16=191.5, bf16=191.5, watts=280,
         source="AMD Instinct MI250X data sheet, one of its two dies, which torch sees as a device",
         links=_USUAL_LINKS["MI250X"]),
    _gpu("MI300X", 192, 5300, fp32=163.4, fp16=1307.4, bf16=1307.4, watts=750,
         source="AMD Instinct MI300X data sheet",
         links=_USUAL_LINKS["MI300X"]),
    CatalogEntry(
        device=Device(
            name="cpu",
            kind="cpu",
            memory_bytes=8 * _GIB,
            bytes_per_second=20 * _GIGA,
            flops_per_second={"fp32": 0.1 * _TERA, "bf16": 0.05 * _TERA, "fp16": 0.02 * _TERA},
            reserve_bytes=0.5 * _GIB,
            source="a rank with four cores of a laptop, an assumption: `here` measures the real one",
        ),
        inside="loopback", between="eth-1g", host="memory",
    ),
)  # fmt: skip

DEVICES: dict[str, CatalogEntry] = {row.device.name: row for row in _ENTRIES}

_DRIVER_NAMES = {
    "NVIDIA A100-SXM4-40GB": "A100-40G",
    "NVIDIA A100-SXM4-80GB": "A100-80G",
    "NVIDIA H100 80GB HBM3": "H100-80G",
    "NVIDIA H100 PCIe": "H100-80G-PCIE",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
    "Tesla V100-SXM2-16GB": "V100-16G",
    "Tesla V100-SXM2-32GB": "V100-32G",
    "Tesla T4": "T4",
    "NVIDIA GeForce RTX 3090": "RTX-3090",
    "NVIDIA GeForce RTX 4090": "RTX-4090",
}


def sheet_rates(gpu: str) -> dict[str, float]:
    """Return the peak rates of a GPU from its data sheet, by precision; empty if the data sheet is unknown.

    `gpu` is the name that the driver reports.
    """
    name = _DRIVER_NAMES.get(gpu)
    return dict(DEVICES[name].device.flops_per_second) if name else {}


def _link(name: str, microseconds: float, gigabytes: float, source: str, *, is_shared: bool = False) -> Link:
    """Return a link, from its latency in microseconds and its bandwidth in GB/s each way."""
    return Link(
        name=name,
        latency_seconds=microseconds * _MICRO,
        bytes_per_second=gigabytes * _GIGA,
        is_shared=is_shared,
        source=source,
    )


_LINKS = (
    _link("nvlink2", 4, 150, "NVIDIA V100 data sheet: 300 GB/s both ways"),
    _link("nvlink3", 3, 300, "NVIDIA A100 data sheet: 600 GB/s both ways"),
    _link("nvlink4", 3, 450, "NVIDIA H100 data sheet: 900 GB/s both ways"),
    _link("nvlink5", 3, 900, "NVIDIA HGX B200 data sheet: 1.8 TB/s both ways"),
    _link("xgmi3", 5, 200, "AMD CDNA 2 white paper: four links of 50 GB/s each way a die"),
    _link("xgmi4", 5, 448, "AMD Instinct MI300X data sheet: seven links of 128 GB/s both ways"),
    _link("pcie3", 8, 15.75, "PCI Express 3.0 base specification, 16 lanes"),
    _link("pcie4", 8, 31.5, "PCI Express 4.0 base specification, 16 lanes"),
    _link("pcie5", 8, 63, "PCI Express 5.0 base specification, 16 lanes"),
    _link("ib-hdr", 6, 25, "NVIDIA ConnectX-6 data sheet: 200 Gbit/s, one port per rank"),
    _link("ib-ndr", 6, 50, "NVIDIA ConnectX-7 data sheet: 400 Gbit/s, one port per rank"),
    _link("roce-200g", 8, 25, "IEEE 802.3bs, 200 Gbit/s, one port per rank"),
    _link("roce-400g", 8, 50, "IEEE 802.3bs, 400 Gbit/s, one port per rank"),
    _link("eth-1g", 60, 0.125, "IEEE 802.3ab, 1 Gbit/s, one port per node", is_shared=True),
    _link("eth-10g", 40, 1.25, "IEEE 802.3ae, 10 Gbit/s, one port per node", is_shared=True),
    _link("eth-25g", 30, 3.125, "IEEE 802.3by, 25 Gbit/s, one port per node", is_shared=True),
    _link("eth-100g", 25, 12.5, "IEEE 802.3ba, 100 Gbit/s, one port per node", is_shared=True),
    _link("loopback", 50, 2, "processes of one machine over gloo, an assumption: `here` measures the real one"),
    _link("memory", 1, 10, "a copy within a host's memory, an assumption"),
)
LINKS: dict[str, Link] = {link.name: link for link in _LINKS}


def catalog_cluster(entry: CatalogEntry, *, nodes: int = 1, devices: int = 1, between: Link | None = None) -> Cluster:
    """Return a cluster of a catalogue device with its usual links; `between` replaces the link between nodes."""
    return Cluster(
        device=entry.device,
        nodes=nodes,
        devices=devices,
        inside=LINKS[entry.inside],
        between=between or LINKS[entry.between],
        host=LINKS[entry.host],
        host_bytes=None if entry.host_bytes is None else entry.host_bytes * devices,
    )


def find_device(name: str, *, problems: list[PacelineError], where: str = "") -> CatalogEntry:
    """Return the catalogue entry of a device, ignoring upper and lower case.

    If the name is unknown, add an error to `problems` and return the entry of `cpu`.
    """
    entries = {known.lower(): row for known, row in DEVICES.items()}
    if (row := entries.get(name.strip().lower())) is not None:
        return row
    extension = next((other for other in DEVICES if other.lower().startswith(f"{name.strip().lower()}-")), "")
    cause = f"did you mean {extension!r}?" if extension else did_you_mean(name.upper(), DEVICES)
    problems.append(
        UsageError(f"{name!r} is not a known device.", where=where, cause=cause, hint=f"one of {', '.join(DEVICES)}")
    )
    return DEVICES["cpu"]


def find_link(name: str, *, problems: list[PacelineError], where: str = "") -> Link:
    """Return a link of the catalogue, ignoring upper and lower case.

    If the name is unknown, add an error to `problems` and return `loopback`.
    """
    if (row := LINKS.get(name.strip().lower())) is not None:
        return row
    cause = did_you_mean(name.strip().lower(), LINKS)
    problems.append(
        UsageError(f"{name!r} is not a known link.", where=where, cause=cause, hint=f"one of {', '.join(LINKS)}")
    )
    return LINKS["loopback"]
