"""Lower bounds, provable, on the seconds and bytes of every candidate below a node of the search.

Seconds of a bough: all samples of a replica form one microbatch, spread evenly over the stages. Every cost of a part is
a constant plus a multiple of the samples, or the larger of two such, so more and smaller microbatches cost no less; and
the busiest stage does no less than the mean. A branch uses its own microbatches. A twig uses its own stages, without
data-parallel communication, which makes no stage faster and no form of `makespan` shorter. A leaf adds the end of the
step on one of its ranks.

Bytes of a bough: the activations of the first rank, under the schedule that holds least there. A twig uses its own
activations, with the smallest state that each ZeRO stage leaves there: all replicas as shards, and everything offloaded
that may be.
"""

from collections.abc import Iterator

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.cost.memory import memory_of
from paceline.planner.cost.pipeline_formulas import SPLITS
from paceline.planner.cost.step_time import end_of, pipeline_seconds
from paceline.planner.search.search_space import SearchSpace


class Bounds:
    """Lower bounds for the nodes of one grid under one cost model."""

    def __init__(self, *, forecast: CostModel, grid: SearchSpace) -> None:
        self._forecast = forecast
        self._grid = grid
        facts = forecast.facts
        self._start = forecast.efficiency.step_seconds
        self._batch = facts.global_batch_size

    def bough_seconds(self, bough: Candidate) -> float:
        """Return a lower bound on the seconds, for any microbatch size and schedule."""
        return self._whole_seconds(self._whole(bough)) / bough.pp + self._start

    def branch_seconds(self, branch: Candidate) -> float:
        """Return a lower bound on the seconds, for any schedule.

        The mean stage works all the time, and the first microbatch passes through all stages. Deferred weight gradients
        fill that gap; with several stages per rank, the first microbatch arrives sooner by that factor.
        """
        p, micro = branch.pp, branch.num_micro(self._batch)
        each = self._whole_seconds(branch)
        loops = max(self._grid.virtual, default=1)
        fill = (1 - 1 / p) / max(2, loops)
        if branch.remat == "none" and branch.tp == 1 and set(SPLITS) & set(self._grid.schedules):
            fill = 0.0
        return each * (micro / p + fill) + self._start

    def bough_bytes(self, bough: Candidate) -> float:
        """Return a lower bound on the bytes, for any microbatch size, schedule and sharding.

        The first rank holds one microbatch for each pipeline rank.
        """
        forecast, whole = self._forecast, self._whole(bough)
        works, share = forecast.works(whole), whole.micro_batch_size
        held: float = 1 if "naive" in self._grid.schedules else min(share, bough.pp)
        if "zbv" in self._grid.schedules and bough.pp > 1:
            held = min(held, bough.pp - 0.5)  # with the fewest microbatches it holds half a microbatch less
        least = min(
            sum(
                number * work.kept_bytes
                for stage in forecast.ranks(one)[0][1]
                for number, work in zip(stage, works, strict=True)
            )
            for one in self._looped(bough)
        )
        return self._beside(least / share * held)

    def twig_seconds(self, twig: Candidate) -> float:
        """Return a lower bound on the seconds, however data parallelism shards the rest."""
        forecast = self._forecast
        hop, micro = forecast.hop_seconds(twig), forecast.num_micro(twig)
        return pipeline_seconds(twig, forecast.stages(twig), micro=micro, hop=hop) + self._start

    def twig_bytes(self, twig: Candidate) -> float:
        """Return a lower bound on the bytes, however data parallelism shards the rest."""
        return min(self._each_bytes(twig))

    def may_fit(self, twig: Candidate, limit_bytes: float) -> bool:
        """Return True if `twig_bytes` is at most `limit_bytes`; usually the first candidate tried decides."""
        return any(each <= limit_bytes for each in self._each_bytes(twig))

    def _each_bytes(self, twig: Candidate) -> Iterator[float]:
        forecast = self._forecast
        rank, stages = forecast.ranks(twig)[0]
        alive, elements = forecast.alive_on(twig, rank, stages), forecast.elements(twig, stages)
        least = self._beside(alive.narrow_bytes)
        if least > forecast.fleet.device.memory_bytes:
            yield least
            return
        for frugal in self._frugal(twig):
            yield memory_of(
                frugal, forecast.facts, elements, alive, device=forecast.fleet.device, efficiency=forecast.efficiency
            ).peak_bytes

    def _frugal(self, twig: Candidate) -> Iterator[Candidate]:
        """Yield the leaf that needs least memory for each ZeRO stage, the last stage first, then the twig itself.

        These leaves may be illegal; no legal one needs less.
        """
        if twig.replicas > 1:
            for zero in reversed(self._grid.zero):
                own = [o for o in self._grid.offload if zero == 3 or "parameters" not in o]
                offload = max(own, key=len, default=()) if self._forecast.fleet.device.is_accelerator else ()
                params = "bf16" if zero == 3 and "bf16" in self._grid.params else "fp32"
                yield twig.but(dp_replicate=1, dp_shard=twig.replicas, zero=zero, offload=offload, params=params)
        yield twig

    def leaf_seconds(self, leaf: Candidate, *, twig_seconds: float) -> float:
        """Return a lower bound on the seconds: all but the sharding communication of every microbatch."""
        forecast = self._forecast
        stages = forecast.ranks(leaf)[0][1]
        end = end_of(
            leaf, forecast.stages(leaf)[0], forecast.elements(leaf, stages), facts=forecast.facts,
            device=forecast.fleet.device, groups=forecast.groups(leaf), efficiency=forecast.efficiency,
        )  # fmt: skip
        return twig_seconds + sum(end.values()) - self._start

    def _whole_seconds(self, branch: Candidate) -> float:
        """Return the seconds of one microbatch through the whole model, on one rank of each stage."""
        works = zip(self._forecast.chain.whole, self._forecast.works(branch), strict=True)
        return sum(number * work.seconds for number, work in works)

    def _whole(self, bough: Candidate) -> Candidate:
        return bough.but(micro_batch_size=-(-self._batch // bough.replicas))

    def _looped(self, bough: Candidate) -> list[Candidate]:
        """Return one candidate for each way to place stages on the ranks."""
        if bough.pp == 1:
            return [bough]
        virtual = [n for n in {1, 2, *self._grid.virtual} if bough.pp * n <= self._forecast.chain.num_blocks]
        made = [bough.but(virtual=n, schedule="interleaved" if n > 1 else "1f1b") for n in virtual]
        return [*made, *(one.but(schedule="zbv") for one in made if one.virtual == 2)]

    def _beside(self, alive: float) -> float:
        return alive * (1 + self._forecast.efficiency.slack) + self._forecast.fleet.device.reserve_bytes
