"""The cost model: closed forms for a candidate's memory, step time and price on a cluster."""

from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property

from paceline.planner.cost.activations import ActivationPeak, alive_of
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.forecast_margins import bytes_margin
from paceline.planner.cost.layer_cost import LayerCost, LayerPlacement, layer_cost
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.cost.memory import Elements, Memory, elements_of, memory_of
from paceline.planner.cost.pipeline_formulas import max_in_flight
from paceline.planner.cost.step_time import (
    CommGroups,
    Stage,
    StepTime,
    end_of,
    seconds_of,
    stage_of,
    with_sharding_communication,
)
from paceline.planner.hardware.cluster import Cluster, group_of, of_family
from paceline.planner.hardware.efficiency import Efficiency, default_efficiency
from paceline.planner.model_costs.layer_chain import Chain, Counts, chain_of
from paceline.planner.model_costs.model_profile import ModelProfile
from paceline.planner.model_costs.training_flops import model_flops
from paceline.schedule.registry import schedule_named

_HOUR = 3600.0


class CostModel:
    """A cost model of one model on one cluster. It caches what candidates share, so each estimate is cheap."""

    def __init__(
        self,
        *,
        facts: ModelProfile,
        fleet: Cluster,
        efficiency: Efficiency | None = None,
        device_bytes: float | None = None,
    ) -> None:
        self.facts = facts
        self.fleet = fleet
        self.device_bytes = device_bytes or fleet.device.memory_bytes
        self.efficiency = efficiency or default_efficiency(fleet.device)
        self._works: dict[Hashable, tuple[LayerCost, ...]] = {}
        self._stages: dict[Hashable, tuple[Stage, ...]] = {}
        self._cuts: dict[int, tuple[tuple[Counts, ...], tuple[int, ...]]] = {}
        self._ranks: dict[Hashable, tuple[tuple[int, tuple[Counts, ...]], ...]] = {}
        self._elements: dict[Hashable, Elements] = {}
        self._groups: dict[Hashable, CommGroups] = {}
        self._alive: dict[Hashable, tuple[ActivationPeak, ...]] = {}

    @cached_property
    def chain(self) -> Chain:
        """The model as a chain of parts."""
        return chain_of(self.facts)

    @cached_property
    def model_flops(self) -> float:
        """The model FLOPs of one step over all ranks, as MFU counts them."""
        return model_flops(self.facts)

    def num_micro(self, candidate: Candidate) -> int:
        """Return the number of microbatches of one replica in a step."""
        return candidate.num_micro(self.facts.global_batch_size)

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the full estimate of a candidate, which must be legal: see `search.search_space`.

        Raises:
            LayoutError: there are more stages than blocks.
        """
        stages = self._cut(candidate)[1] if candidate.pp > 1 else ()
        seconds, memory = self.seconds(candidate), self.memory(candidate)
        price = self.fleet.price_per_hour
        return Estimate(
            candidate=candidate,
            memory=memory,
            seconds=seconds,
            stages=stages,
            num_micro=self.num_micro(candidate),
            limit_bytes=self.fleet.device.memory_bytes,
            device_bytes=self.device_bytes,
            samples=self.facts.global_batch_size,
            length=self.facts.length,
            is_gpu=self.fleet.device.is_accelerator,
            model_flops=self.model_flops,
            peak_flops_per_second=self.fleet.device.peak(candidate.precision),
            margin_bytes=bytes_margin(memory, self.fleet.device, is_replayed=False),
            host_limit_bytes=self.host_limit_bytes,
            price=None if price is None else price * self.fleet.nodes * seconds.step_seconds / _HOUR,
            currency=self.fleet.currency,
        )

    def below(self, peak_bytes: float) -> "CostModel":
        """Return a model whose devices offer at most `peak_bytes`, for use after a run ran out of memory."""
        device = replace(self.fleet.device, memory_bytes=min(peak_bytes, self.fleet.device.memory_bytes))
        fleet = replace(self.fleet, device=device)
        return CostModel(facts=self.facts, fleet=fleet, efficiency=self.efficiency, device_bytes=self.device_bytes)

    def of(self, facts: ModelProfile) -> "CostModel":
        """Return a cost model on the same cluster for another profile of the model."""
        return CostModel(facts=facts, fleet=self.fleet, efficiency=self.efficiency, device_bytes=self.device_bytes)

    def fuller(self, family: str, times: float) -> "CostModel":
        """Return a model in which layouts of a family need `times` the memory that this one forecasts for them."""
        fuller = {**self.fleet.fuller, family: times * max(1.0, of_family(self.fleet.fuller, family))}
        fleet = replace(self.fleet, fuller=fuller)
        return CostModel(facts=self.facts, fleet=fleet, efficiency=self.efficiency, device_bytes=self.device_bytes)

    @property
    def host_limit_bytes(self) -> float | None:
        """A rank's share of its host's memory; None if the host's memory is unknown."""
        return None if self.fleet.host_bytes is None else self.fleet.host_bytes / self.fleet.devices

    def memory(self, candidate: Candidate) -> Memory:
        """Return the memory of the fullest rank. `host_bytes` is that of the rank that offloads most."""
        device, efficiency = self.fleet.device, self.efficiency
        ranks = zip(self.ranks(candidate), self.alive(candidate), strict=True)
        every = [
            memory_of(
                candidate, self.facts, self.elements(candidate, stages), alive, device=device, efficiency=efficiency
            )
            for (_, stages), alive in ranks
        ]
        fullest = max(every, key=lambda memory: memory.peak_bytes)
        fullest = fullest.fuller(of_family(self.fleet.fuller, candidate.family))
        if not candidate.offload:
            return fullest
        return replace(fullest, host_bytes=max(memory.host_bytes for memory in every))

    def longer(self, family: str) -> float:
        """Return the measured step time of this family divided by its forecast."""
        return of_family(self.fleet.longer, family)

    def seconds(self, candidate: Candidate) -> StepTime:
        """Return the time of one optimizer step."""
        stages, hop = self.all_stages(candidate), self.hop_seconds(candidate)
        end = max(self.ends(candidate).values(), key=lambda found: sum(found.values()))
        found = seconds_of(candidate, stages, micro=self.num_micro(candidate), hop=hop, end=end)
        return found.times(self.longer(candidate.family))

    def ends(self, candidate: Candidate) -> dict[tuple[Counts, ...], dict[str, float]]:
        """Return the seconds of the work done once a step, by the stages that a rank holds."""
        groups = self.groups(candidate)
        made = dict(zip(self.counts(candidate), self.all_stages(candidate), strict=True))
        return {
            own: end_of(
                candidate, made[own[0]], self.elements(candidate, own), facts=self.facts,
                device=self.fleet.device, groups=groups, efficiency=self.efficiency,
            )
            for _, own in self.ranks(candidate)
        }  # fmt: skip

    def counts(self, candidate: Candidate) -> tuple[Counts, ...]:
        """Return how many of each part every stage has."""
        return self._cut(candidate)[0]

    def all_stages(self, candidate: Candidate) -> tuple[Stage, ...]:
        """Return the seconds of every stage, including data-parallel communication in every microbatch."""
        counts, groups = self._cut(candidate)[0], self.groups(candidate)
        made: dict[Counts, Stage] = {}
        for own, stage in zip(counts, self.stages(candidate), strict=True):
            if own not in made:
                units = sum(own[2:]) + (candidate.pp == 1)
                made[own] = with_sharding_communication(
                    stage, self.elements(candidate, (own,)), units=units, candidate=candidate, facts=self.facts,
                    groups=groups, efficiency=self.efficiency,
                )  # fmt: skip
        return tuple(made[own] for own in counts)

    def hop_seconds(self, candidate: Candidate) -> float:
        """Return the seconds to send one microbatch's activations from a stage to the next."""
        if candidate.pp == 1:
            return 0.0
        return self.groups(candidate).stage.pass_on(max(work.border_bytes for work in self.works(candidate)[2:]))

    def works(self, candidate: Candidate) -> tuple[LayerCost, ...]:
        """Return the cost of each distinct part for one microbatch."""
        c = candidate
        key = (c.micro_batch_size, c.cp, c.tp, c.ep, c.sequence, c.remat)
        if key not in self._works:
            axes = {"tp": (1, c.tp), "cp": (c.tp, c.cp), "ep": (c.tp * c.cp, c.ep)}
            split = LayerPlacement(
                samples=c.micro_batch_size, length=self.facts.length, precision=self.facts.precision,
                sequence=c.sequence, remat=c.remat,
                **{name: group_of(self.fleet, (axis,), efficiency=self.efficiency.link) for name, axis in axes.items()},
            )  # fmt: skip
            self._works[key] = tuple(
                layer_cost(
                    part,
                    is_block=i > 1,
                    split=split,
                    device=self.fleet.device,
                    efficiency=self.efficiency,
                    is_compiled=self.facts.compiles and (i > 1 or not self.facts.blocks),
                )
                for i, part in enumerate(self.chain.parts)
            )
        return self._works[key]

    def stages(self, candidate: Candidate) -> tuple[Stage, ...]:
        """Return the seconds of every stage, without data-parallel communication."""
        c = candidate
        key = (c.micro_batch_size, c.cp, c.tp, c.ep, c.sequence, c.remat, c.pp * c.virtual)
        if key not in self._stages:
            works, counts = self.works(c), self._cut(c)[0]
            made = {own: stage_of(works, own) for own in set(counts)}
            self._stages[key] = tuple(made[own] for own in counts)
        return self._stages[key]

    def alive(self, candidate: Candidate) -> tuple[ActivationPeak, ...]:
        """Return the activation peak of each distinct rank, in the order of `ranks`."""
        c = candidate
        micro = self.num_micro(c)
        key = (c.micro_batch_size, c.cp, c.tp, c.ep, c.sequence, c.remat, c.pp, c.virtual, c.schedule, micro)
        if key not in self._alive:
            self._alive[key] = tuple(self.alive_on(c, rank, stages) for rank, stages in self.ranks(c))
        return self._alive[key]

    def alive_on(self, candidate: Candidate, rank: int, stages: tuple[Counts, ...]) -> ActivationPeak:
        """Return the activation peak of a pipeline rank that holds these stages."""
        micro = self.num_micro(candidate)
        held = self._held(candidate, micro, rank)
        return alive_of(self.works(candidate), stages, held=held, total=micro * len(stages))

    def ranks(self, candidate: Candidate) -> tuple[tuple[int, tuple[Counts, ...]], ...]:
        """Return the pipeline ranks with distinct stages; of equal ones the first, which holds most activations."""
        c = candidate
        key = (c.pp, c.virtual, c.schedule == "zbv")
        if key not in self._ranks:
            counts = self._cut(c)[0]
            owner = schedule_named(c.schedule).placement(ranks=c.pp, virtual=c.virtual) if c.pp > 1 else (0,)
            found: dict[tuple[Counts, ...], int] = {}
            for rank in range(c.pp):
                own = tuple(stage for stage, place in zip(counts, owner, strict=True) if place == rank)
                found.setdefault(own, rank)
            self._ranks[key] = tuple((rank, own) for own, rank in found.items())
        return self._ranks[key]

    def elements(self, candidate: Candidate, stages: tuple[Counts, ...]) -> Elements:
        """Return the parameter counts of a rank that holds these stages."""
        key = (stages, candidate.tp, candidate.ep)
        if key not in self._elements:
            counts = tuple(map(sum, zip(*stages, strict=True)))
            self._elements[key] = elements_of(self.facts, self.chain, counts, tp=candidate.tp, ep=candidate.ep)
        return self._elements[key]

    def groups(self, candidate: Candidate) -> CommGroups:
        """Return the communication groups of a rank."""
        c = candidate
        key = (c.pp, c.dp_replicate, c.dp_shard, c.cp, c.tp, c.ep)
        if key not in self._groups:
            shard = (c.tp * c.cp, c.dp_shard)
            replicate = (c.tp * c.cp * c.dp_shard, c.dp_replicate)
            twins = (c.tp * c.cp * c.ep, c.replicas // c.ep)
            made = {
                "shard": (shard,),
                "rows": ((c.tp, c.cp), replicate),
                "data": ((c.tp, c.cp), shard, replicate),
                "twins": ((c.tp, c.cp), twins),
                "stage": ((c.ranks // c.pp, c.pp),),
            }
            link = self.efficiency.link
            found = {name: group_of(self.fleet, axes, efficiency=link) for name, axes in made.items()}
            host = self.fleet.host
            host = replace(host, bytes_per_second=host.bytes_per_second * link)
            self._groups[key] = CommGroups(**found, host=host)
        return self._groups[key]

    def _cut(self, candidate: Candidate) -> tuple[tuple[Counts, ...], tuple[int, ...]]:
        """Return how many of each part every stage has, and the number of blocks of each stage."""
        num_stages = candidate.pp * candidate.virtual
        if num_stages not in self._cuts:
            bounds = self.chain.cut(num_stages)
            self._cuts[num_stages] = self.chain.stages(bounds), tuple(stop - start for start, stop in bounds)
        return self._cuts[num_stages]

    def _held(self, candidate: Candidate, micro: int, rank: int) -> int:
        c = candidate
        if c.pp == 1:
            return 1
        return max_in_flight(c.schedule, ranks=c.pp, micro=micro, virtual=c.virtual, rank=rank)
