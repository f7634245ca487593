"""Define the efficiency constants of the forecast: the fractions of a data sheet's rates that training reaches."""

from dataclasses import asdict, dataclass

from paceline.planner.hardware.cluster import Device

_PRECISION_BYTES = {"float8": 1, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The fractions of device and link rates that training reaches, and fixed costs.

    `matmul` and `attention` are fractions of the matmul rate that the power limit allows (`rate`). `flops_per_joule` is
    that of 16-bit matmuls at the power limit of a device, if its data sheet states one; 8-bit matmuls have twice as
    many. `memory` is the fraction of the memory bandwidth for all other operations, `link` that of a link's bandwidth.
    `overlap` is the fraction of compute that can hide messages. `host` is the speed of an update on the host, as a
    fraction of the bandwidth of the link to the host. `part_seconds` is the time to launch the kernels of a part of the
    model in one direction, `unit_seconds` that to gather and free a unit, `step_seconds` the overhead of a step.
    `slack` is the memory that the allocator holds beyond requests, as a fraction of transient memory.
    """

    matmul: float = 0.65
    attention: float = 0.40
    flops_per_joule: float = 1e12
    memory: float = 0.80
    link: float = 0.80
    overlap: float = 0.90
    host: float = 0.25
    part_seconds: float = 3e-5
    unit_seconds: float = 0.0
    step_seconds: float = 2e-3
    slack: float = 0.05

    def rate(self, device: Device, precision: str) -> float:
        """Return the sustained operations per second: the rate of the device or, if lower, that of its power limit."""
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
"""Fitted to the `fit` rows of benchmarks/published.toml: `python -m benchmarks.published --rows fit --fit`."""
CPU_EFFICIENCY = Efficiency(attention=0.5, overlap=0.2, part_seconds=2e-4, unit_seconds=3e-4, step_seconds=3e-3)
"""The constants for CPUs, where communication takes cores from compute and no kernel is launched ahead."""


def default_efficiency(device: Device) -> Efficiency:
    """Return the constants that are assumed if nothing was measured."""
    return GPU_EFFICIENCY if device.is_accelerator else CPU_EFFICIENCY
