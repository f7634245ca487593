"""Efficiency constants of the forecast: the fraction of a data sheet's rates that is reached, to be fitted."""

from dataclasses import asdict, dataclass

from paceline.planner.hardware.cluster import Device

_BYTES = {"float8": 1, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The fractions of the device's and the links' rates that are reached, and fixed costs.

    `matmul` and `attention` are fractions of the matmul rate that the power limit allows (`rate`). `flops_per_joule` is
    that of 16-bit matmuls at a device's power limit, if its data sheet states one; 8-bit ones have twice as many.
    `memory` is the fraction of the memory bandwidth for everything but matmuls, `link` of a link's bandwidth. `overlap`
    is the fraction of compute that hides messages. `host` is the speed of an update on the host, as a fraction of the
    link to the host. `part_seconds` is the time to start the kernels of a part of the model in one direction,
    `unit_seconds` to gather and free a unit, `step_seconds` once a step. `slack` is what the allocator holds beyond
    requests, as a fraction of transient memory.
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
        """Return the sustained operations per second: the data sheet's, or what the power limit allows."""
        rate = device.rate(precision)
        if device.watts is None:
            return rate
        return min(rate, device.watts * self.flops_per_joule * 2 / _BYTES.get(precision, 4))

    def as_json(self) -> dict[str, float]:
        """Return the constants by name."""
        return asdict(self)


ON_GPU = Efficiency(matmul=0.746, attention=0.344, flops_per_joule=1.13e12, memory=0.948, link=0.95, overlap=0.699)
"""Fitted to the `fit` rows of benchmarks/published.toml: `python -m benchmarks.published --rows fit --fit`."""
ON_CPU = Efficiency(attention=0.5, overlap=0.2, part_seconds=2e-4, unit_seconds=3e-4, step_seconds=3e-3)
"""The constants for CPUs: communication takes cores from compute, and nothing is launched ahead."""


def default_efficiency(device: Device) -> Efficiency:
    """Return the constants that are assumed until something is measured."""
    return ON_GPU if device.is_accelerator else ON_CPU
