"""What of a sheet's rates is reached: the constants of the forecast, in one place so that a fit can change them."""

from dataclasses import asdict, dataclass

from paceline.planner.hardware.cluster import Device

_BYTES = {"float8": 1, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Parts of 1 of the device's and the links' rates, and what everything costs beside.

    `matmul`, `attention`: of the rate of products that power leaves (`rate`). `flops_per_joule` are of products in 16
    bits at a device's limit of power, where its sheet names one; of half the bits twice as many. `memory`: of the
    bandwidth, for all that is no product. `link`: of a link's bandwidth. `overlap`: of the compute that hides messages,
    how much of it does. `host`: of the way to the host, the speed of an update that the host does itself.
    `part_seconds`: to start the kernels of a part of the model in one direction; `unit_seconds`: to gather a unit and
    to let it go. `step_seconds`: once a step. `slack`: what the allocator holds beside what is asked of it, as a part
    of what comes and goes.
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
        """Operations a second that a device keeps up: its sheet's, or what its power is enough for."""
        rate = device.rate(precision)
        if device.watts is None:
            return rate
        return min(rate, device.watts * self.flops_per_joule * 2 / _BYTES.get(precision, 4))

    def as_json(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


ON_GPU = Efficiency(matmul=0.746, attention=0.344, flops_per_joule=1.13e12, memory=0.948, link=0.95, overlap=0.699)
"""Fitted to the `fit` rows of benchmarks/published.toml: `python -m benchmarks.published --rows fit --fit`."""
ON_CPU = Efficiency(attention=0.5, overlap=0.2, part_seconds=2e-4, unit_seconds=3e-4, step_seconds=3e-3)
"""On CPUs whoever sends takes cores from whoever computes, and nothing is started ahead."""


def default_efficiency(device: Device) -> Efficiency:
    """What is assumed until something is measured."""
    return ON_GPU if device.is_accelerator else ON_CPU
