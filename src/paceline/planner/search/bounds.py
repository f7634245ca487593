"""What no candidate that grows from a node of the search can do better than: seconds and bytes, provably.

Seconds of a bough: all samples of a replica as one microbatch, dealt evenly to the stages. Every cost of a part is a
constant and a multiple of the samples, or the larger of two such, so more and smaller microbatches cost no less; and
the busiest stage does no less than the mean. Of a branch: its own microbatches. Of a twig: its own stages, before what
data parallelism sends, which makes no stage quicker and no form of `makespan` shorter. Of a leaf: with what comes at
the end of the step on one of its ranks.

Bytes of a bough: activations of the first rank, under the schedule that holds least there. Of a twig: its own, with the
least that each stage of ZeRO leaves there: all replicas as shards, on the host what may lie there.
"""

from collections.abc import Iterator

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.cost.memory import memory_of
from paceline.planner.cost.pipeline_formulas import SPLITS
from paceline.planner.cost.step_time import end_of, pipeline_seconds
from paceline.planner.search.search_space import SearchSpace


class Bounds:
    """Of one forecast on one grid."""

    def __init__(self, *, forecast: CostModel, grid: SearchSpace) -> None:
        self._forecast = forecast
        self._grid = grid
        facts = forecast.facts
        self._start = forecast.efficiency.step_seconds
        self._batch = facts.global_batch_size

    def bough_seconds(self, bough: Candidate) -> float:
        """Whatever the microbatch and the schedule."""
        return self._whole_seconds(self._whole(bough)) / bough.pp + self._start

    def branch_seconds(self, branch: Candidate) -> float:
        """Whatever the schedule: the mean stage works all the time, and the first microbatch goes through them all.

        What is put off fills that gap; and a loop of many stages a rank passes it on so many times sooner.
        """
        p, micro = branch.pp, branch.num_micro(self._batch)
        each = self._whole_seconds(branch)
        loops = max(self._grid.virtual, default=1)
        fill = (1 - 1 / p) / max(2, loops)
        if branch.remat == "none" and branch.tp == 1 and set(SPLITS) & set(self._grid.schedules):
            fill = 0.0
        return each * (micro / p + fill) + self._start

    def bough_bytes(self, bough: Candidate) -> float:
        """Whatever the microbatch, the schedule and the shards: the first rank holds a microbatch for each rank."""
        forecast, whole = self._forecast, self._whole(bough)
        works, share = forecast.works(whole), whole.micro_batch_size
        held: float = 1 if "naive" in self._grid.schedules else min(share, bough.pp)
        if "zbv" in self._grid.schedules and bough.pp > 1:
            held = min(held, bough.pp - 0.5)  # with the fewest microbatches it holds half a one less
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
        """However data parallelism shares the rest."""
        forecast = self._forecast
        hop, micro = forecast.hop_seconds(twig), forecast.num_micro(twig)
        return pipeline_seconds(twig, forecast.stages(twig), micro=micro, hop=hop) + self._start

    def twig_bytes(self, twig: Candidate) -> float:
        """However data parallelism shares the rest."""
        return min(self._each_bytes(twig))

    def may_fit(self, twig: Candidate, limit_bytes: float) -> bool:
        """Whether `twig_bytes` are no more than this: mostly what needs least does."""
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
        """Its leaves that need least, of each stage of ZeRO, the last first. They may not be legal; no legal one needs
        less."""
        if twig.replicas > 1:
            for zero in reversed(self._grid.zero):
                own = [o for o in self._grid.offload if zero == 3 or "parameters" not in o]
                offload = max(own, key=len, default=()) if self._forecast.fleet.device.is_accelerator else ()
                params = "bf16" if zero == 3 and "bf16" in self._grid.params else "fp32"
                yield twig.but(dp_replicate=1, dp_shard=twig.replicas, zero=zero, offload=offload, params=params)
        yield twig

    def leaf_seconds(self, leaf: Candidate, *, twig_seconds: float) -> float:
        """All but what is gathered and added up in every microbatch."""
        forecast = self._forecast
        stages = forecast.ranks(leaf)[0][1]
        end = end_of(
            leaf, forecast.stages(leaf)[0], forecast.elements(leaf, stages), facts=forecast.facts,
            device=forecast.fleet.device, groups=forecast.groups(leaf), efficiency=forecast.efficiency,
        )  # fmt: skip
        return twig_seconds + sum(end.values()) - self._start

    def _whole_seconds(self, branch: Candidate) -> float:
        """Of one microbatch through all of the model, on one rank of each stage."""
        works = zip(self._forecast.chain.whole, self._forecast.works(branch), strict=True)
        return sum(number * work.seconds for number, work in works)

    def _whole(self, bough: Candidate) -> Candidate:
        return bough.but(micro_batch_size=-(-self._batch // bough.replicas))

    def _looped(self, bough: Candidate) -> list[Candidate]:
        """One for each way in which stages lie on the ranks."""
        if bough.pp == 1:
            return [bough]
        virtual = [n for n in {1, 2, *self._grid.virtual} if bough.pp * n <= self._forecast.chain.num_blocks]
        made = [bough.but(virtual=n, schedule="interleaved" if n > 1 else "1f1b") for n in virtual]
        return [*made, *(one.but(schedule="zbv") for one in made if one.virtual == 2)]

    def _beside(self, alive: float) -> float:
        return alive * (1 + self._forecast.efficiency.slack) + self._forecast.fleet.device.reserve_bytes
