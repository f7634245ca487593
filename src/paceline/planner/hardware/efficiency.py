"""Define the efficiency constants of the forecast: the fractions of a data sheet's rates that training reaches."""

from dataclasses import asdict, dataclass

from paceline.planner.hardware.cluster import Device

_PRECISION_BYTES = {"float8": 1, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The fractions of device and link rates that training reaches, and the fixed costs of a step and its parts."""

    matmul: float = 0.65
    """The speed of matmuls, as a fraction of `rate`."""
    attention: float = 0.40
    """The speed of attention, as a fraction of `rate`."""
    flops_per_joule: float = 1e12
    """The FLOPs per joule of 16-bit matmuls at a device's power limit. 8-bit matmuls have twice as many."""
    memory: float = 0.80
    """The speed of all other operations, as a fraction of the memory bandwidth."""
    link: float = 0.80
    """The fraction of a link's bandwidth that messages reach."""
    overlap: float = 0.90
    """The fraction of compute time that can hide messages."""
    host: float = 0.25
    """The speed of an update on the host, as a fraction of the bandwidth of the link to the host."""
    part_seconds: float = 3e-5
    """The seconds to launch the kernels of a part of the model in one direction."""
    unit_seconds: float = 0.0
    """The seconds to gather and free an fsdp unit, in addition to the messages."""
    step_seconds: float = 2e-3
    """The fixed cost of a step."""
    slack: float = 0.05
    """The memory that the allocator holds beyond what was requested, as a fraction of transient memory."""

    def rate(self, device: Device, precision: str) -> float:
        """Return the device's operations per second in this precision, limited by its power limit."""
        rate = device.rate(precision)
        if device.watts is None:
            return rate
        return min(rate, device.watts * self.flops_per_joule * 2 / _PRECISION_BYTES.get(precision, 4))

    def as_json(self) -> dict[str, float]:
        """Return the constants by name."""
        return asdict(self)


GPU_EFFICIENCY = Efficiency(
    matmul=0.746, attention=0.344, flops_per_joule=1.13e12, memory=0.948, link=0.95, overlap=0.699
)
"""The constants for GPUs, from the `fit` rows of benchmarks/published.toml.

The command `python -m benchmarks.published --rows fit --fit` computes them.
"""
CPU_EFFICIENCY = Efficiency(attention=0.5, overlap=0.2, part_seconds=2e-4, unit_seconds=3e-4, step_seconds=3e-3)
"""The constants for CPUs. Communication and compute share the cores there, and kernels are not launched ahead."""


def default_efficiency(device: Device) -> Efficiency:
    """Return the constants for a device on which nothing was measured."""
    return GPU_EFFICIENCY if device.is_accelerator else CPU_EFFICIENCY
