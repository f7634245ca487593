"""What of a sheet's rates is reached: the constants of the forecast, in one place so that a fit can change them."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Parts of 1 of the device's and the links' rates, and what everything costs beside.

    `matmul`, `attention`: of the rate of products. `memory`: of the bandwidth, for all that is no product. `link`: of a
    link's bandwidth. `overlap`: of the compute that hides messages, how much of it does. `part_seconds`: to start the
    kernels of one part of the model in one direction. `step_seconds`: once a step. `slack`: what the allocator holds
    beside what is asked of it, as a part of what comes and goes.
    """

    matmul: float = 0.65
    attention: float = 0.40
    memory: float = 0.80
    link: float = 0.80
    overlap: float = 0.90
    part_seconds: float = 3e-5
    step_seconds: float = 2e-3
    slack: float = 0.05

    def as_json(self) -> dict[str, float]:
        """By name."""
        return asdict(self)
