"""What of a sheet's rates is reached: the constants of the forecast, in one place so that a fit can change them."""

from dataclasses import asdict, dataclass

from paceline.plan.hardware import Device


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Parts of 1 of the device's and the links' rates, and what everything costs beside.

    `matmul`, `attention`: of the rate of products. `memory`: of the bandwidth, for all that is no product. `link`: of a
    link's bandwidth. `overlap`: of the compute that hides messages, how much of it does. `host`: of the way to the
    host, the speed of an update that the host does itself. `part_seconds`: to start the kernels of a part of the model
    in one direction; `unit_seconds`: to gather a unit and to let it go. `step_seconds`: once a step. `slack`: what the
    allocator holds beside what is asked of it, as a part of what comes and goes.
    """

    matmul: float = 0.65
    attention: float = 0.40
    memory: float = 0.80
    link: float = 0.80
    overlap: float = 0.90
    host: float = 0.25
    part_seconds: float = 3e-5
    unit_seconds: float = 0.0
    step_seconds: float = 2e-3
    slack: float = 0.05

    def as_json(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


ON_GPU = Efficiency()
ON_CPU = Efficiency(attention=0.5, overlap=0.2, part_seconds=2e-4, unit_seconds=3e-4, step_seconds=3e-3)
"""On CPUs whoever sends takes cores from whoever computes, and nothing is started ahead."""


def usual(device: Device) -> Efficiency:
    """What is assumed until something is measured."""
    return ON_GPU if device.is_accelerator else ON_CPU
