"""Define the cost model: it estimates a candidate's memory, step time and price on a cluster, by closed forms."""

from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property

from paceline.planner.cost.activations import ActivationPeak, build_activation_peak
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.forecast_margins import bytes_margin
from paceline.planner.cost.layer_cost import LayerCost, LayerPlacement, layer_cost
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.cost.memory import Elements, Memory, count_elements, estimate_memory
from paceline.planner.cost.pipeline_formulas import max_in_flight
from paceline.planner.cost.step_time import (
    CommGroups,
    Stage,
    StepTime,
    add_sharding_communication,
    build_stage,
    build_step_time,
    estimate_step_end,
)
from paceline.planner.hardware.cluster import Cluster, build_group, family_ratio
from paceline.planner.hardware.efficiency import Efficiency, default_efficiency
from paceline.planner.model_costs.layer_chain import Chain, Counts, build_chain
from paceline.planner.model_costs.model_profile import ModelProfile
from paceline.planner.model_costs.training_flops import model_flops
from paceline.schedule.registry import find_schedule

_HOUR = 3600.0


class CostModel:
    """The cost model of a neural network on a cluster.

    It caches the costs that several candidates share, so that each estimate is cheap. The layouts may use
    `cluster.device.memory_bytes` of each device. `device_bytes` is the full memory of a device; it is needed only if
    `memory_bytes` was lowered to a limit (see `with_memory_limit`).
    """

    def __init__(
        self,
        *,
        profile: ModelProfile,
        cluster: Cluster,
        efficiency: Efficiency | None = None,
        device_bytes: float | None = None,
    ) -> None:
        self.profile = profile
        self.cluster = cluster
        self.device_bytes = device_bytes or cluster.device.memory_bytes
        self.efficiency = efficiency or default_efficiency(cluster.device)
        self._layer_costs: dict[Hashable, tuple[LayerCost, ...]] = {}
        self._stages: dict[Hashable, tuple[Stage, ...]] = {}
        self._stage_counts_cache: dict[int, tuple[tuple[Counts, ...], tuple[int, ...]]] = {}
        self._ranks: dict[Hashable, tuple[tuple[int, tuple[Counts, ...]], ...]] = {}
        self._elements: dict[Hashable, Elements] = {}
        self._groups: dict[Hashable, CommGroups] = {}
        self._activation_peaks: dict[Hashable, tuple[ActivationPeak, ...]] = {}

    @cached_property
    def chain(self) -> Chain:
        """The model as a chain of parts."""
        return build_chain(self.profile)

    @cached_property
    def model_flops(self) -> float:
        """The model FLOPs of one step over all ranks, as MFU counts them."""
        return model_flops(self.profile)

    def num_micro(self, candidate: Candidate) -> int:
        """Return the number of microbatches of one replica in a step."""
        return candidate.num_micro(self.profile.global_batch_size)

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the full estimate of a candidate. The candidate must be legal (see `search.search_space`).

        Raises:
            LayoutError: there are more stages than blocks.
        """
        stages = self._stage_counts(candidate)[1] if candidate.pp > 1 else ()
        seconds, memory = self.seconds(candidate), self.memory(candidate)
        price = self.cluster.price_per_hour
        return Estimate(
            candidate=candidate,
            memory=memory,
            seconds=seconds,
            stages=stages,
            num_micro=self.num_micro(candidate),
            limit_bytes=self.cluster.device.memory_bytes,
            device_bytes=self.device_bytes,
            samples=self.profile.global_batch_size,
            length=self.profile.length,
            is_gpu=self.cluster.device.is_accelerator,
            model_flops=self.model_flops,
            peak_flops_per_second=self.cluster.device.peak(candidate.precision),
            margin_bytes=bytes_margin(memory, self.cluster.device, is_replayed=False),
            host_limit_bytes=self.host_limit_bytes,
            price=None if price is None else price * self.cluster.nodes * seconds.step_seconds / _HOUR,
            currency=self.cluster.currency,
        )

    def with_memory_limit(self, limit_bytes: float) -> "CostModel":
        """Return a cost model whose devices have at most `limit_bytes` of memory."""
        device = replace(self.cluster.device, memory_bytes=min(limit_bytes, self.cluster.device.memory_bytes))
        return self._with(cluster=replace(self.cluster, device=device))

    def with_profile(self, profile: ModelProfile) -> "CostModel":
        """Return a cost model on the same cluster for another profile of the model."""
        return self._with(profile=profile)

    def with_memory_ratio(self, family: str, ratio: float) -> "CostModel":
        """Return a cost model that forecasts `ratio` times as much memory for the layouts of a family."""
        memory_ratios = {**self.cluster.fuller, family: ratio * max(1.0, family_ratio(self.cluster.fuller, family))}
        return self._with(cluster=replace(self.cluster, fuller=memory_ratios))

    def _with(self, *, profile: ModelProfile | None = None, cluster: Cluster | None = None) -> "CostModel":
        return CostModel(
            profile=profile or self.profile, cluster=cluster or self.cluster, efficiency=self.efficiency,
            device_bytes=self.device_bytes,
        )  # fmt: skip

    @property
    def host_limit_bytes(self) -> float | None:
        """A rank's share of its host's memory; None if the host's memory is unknown."""
        return None if self.cluster.host_bytes is None else self.cluster.host_bytes / self.cluster.devices

    def memory(self, candidate: Candidate) -> Memory:
        """Return the memory of the fullest rank, with the `host_bytes` of the rank that offloads most."""
        device, efficiency = self.cluster.device, self.efficiency
        ranks_with_activations = zip(self.distinct_ranks(candidate), self.activation_peaks(candidate), strict=True)
        rank_memories = [
            estimate_memory(
                candidate,
                self.profile,
                self.elements(candidate, stages),
                activations,
                device=device,
                efficiency=efficiency,
            )
            for (_, stages), activations in ranks_with_activations
        ]
        fullest = max(rank_memories, key=lambda memory: memory.peak_bytes)
        fullest = fullest.scaled_by(family_ratio(self.cluster.fuller, candidate.family))
        if not candidate.offload:
            return fullest
        return replace(fullest, host_bytes=max(memory.host_bytes for memory in rank_memories))

    def time_ratio(self, family: str) -> float:
        """Return the ratio of measured to forecast step time of a family in earlier runs, 1 if there are none."""
        return family_ratio(self.cluster.longer, family)

    def seconds(self, candidate: Candidate) -> StepTime:
        """Return the time of one optimizer step."""
        stages, hop = self.stages_with_sharding(candidate), self.hop_seconds(candidate)
        end_seconds = max(
            self.step_end_seconds(candidate).values(), key=lambda seconds_by_part: sum(seconds_by_part.values())
        )
        step_time = build_step_time(
            candidate, stages, micro=self.num_micro(candidate), hop=hop, end_seconds=end_seconds
        )
        return step_time.scaled_by(self.time_ratio(candidate.family))

    def step_end_seconds(self, candidate: Candidate) -> dict[tuple[Counts, ...], dict[str, float]]:
        """Return the seconds of the work at the end of a step by field of `StepTime`, for each distinct rank.

        The key of a rank is the tuple of its stages, each as the counts of its parts.
        """
        groups = self.groups(candidate)
        stages_by_counts = dict(zip(self.part_counts(candidate), self.stages_with_sharding(candidate), strict=True))
        return {
            rank_stages: estimate_step_end(
                candidate, stages_by_counts[rank_stages[0]], self.elements(candidate, rank_stages),
                profile=self.profile, device=self.cluster.device, groups=groups, efficiency=self.efficiency,
            )
            for _, rank_stages in self.distinct_ranks(candidate)
        }  # fmt: skip

    def part_counts(self, candidate: Candidate) -> tuple[Counts, ...]:
        """Return how often each distinct part occurs in every stage."""
        return self._stage_counts(candidate)[0]

    def stages_with_sharding(self, candidate: Candidate) -> tuple[Stage, ...]:
        """Return the times of every stage, with the data-parallel communication of every microbatch."""
        counts, groups = self._stage_counts(candidate)[0], self.groups(candidate)
        stages_by_counts: dict[Counts, Stage] = {}
        for stage_counts, stage in zip(counts, self.stages_without_sharding(candidate), strict=True):
            if stage_counts not in stages_by_counts:
                units = sum(stage_counts[2:]) + (candidate.pp == 1)
                stages_by_counts[stage_counts] = add_sharding_communication(
                    stage, self.elements(candidate, (stage_counts,)), units=units, candidate=candidate,
                    profile=self.profile, groups=groups, efficiency=self.efficiency,
                )  # fmt: skip
        return tuple(stages_by_counts[stage_counts] for stage_counts in counts)

    def hop_seconds(self, candidate: Candidate) -> float:
        """Return the seconds to send one microbatch's activations from a stage to the next."""
        if candidate.pp == 1:
            return 0.0
        return self.groups(candidate).next_stage.send(
            max(cost.border_bytes for cost in self.layer_costs(candidate)[2:])
        )

    def layer_costs(self, candidate: Candidate) -> tuple[LayerCost, ...]:
        """Return the cost of each distinct part for one microbatch."""
        c = candidate
        key = (c.micro_batch_size, c.cp, c.tp, c.ep, c.sequence, c.remat)
        if key not in self._layer_costs:
            axes = {"tp": (1, c.tp), "cp": (c.tp, c.cp), "ep": (c.tp * c.cp, c.ep)}  # as (stride, size)
            placement = LayerPlacement(
                samples=c.micro_batch_size, length=self.profile.length, precision=self.profile.precision,
                sequence=c.sequence, remat=c.remat,
                **{
                    name: build_group(self.cluster, (axis,), efficiency=self.efficiency.link)
                    for name, axis in axes.items()
                },
            )  # fmt: skip
            self._layer_costs[key] = tuple(
                layer_cost(
                    part,
                    is_block=i > 1,
                    placement=placement,
                    device=self.cluster.device,
                    efficiency=self.efficiency,
                    is_compiled=self.profile.compiles and (i > 1 or not self.profile.blocks),
                )
                for i, part in enumerate(self.chain.parts)
            )
        return self._layer_costs[key]

    def stages_without_sharding(self, candidate: Candidate) -> tuple[Stage, ...]:
        """Return the times of every stage, without data-parallel communication."""
        c = candidate
        key = (c.micro_batch_size, c.cp, c.tp, c.ep, c.sequence, c.remat, c.pp * c.virtual)
        if key not in self._stages:
            layer_costs, counts = self.layer_costs(c), self._stage_counts(c)[0]
            stages_by_counts = {stage_counts: build_stage(layer_costs, stage_counts) for stage_counts in set(counts)}
            self._stages[key] = tuple(stages_by_counts[stage_counts] for stage_counts in counts)
        return self._stages[key]

    def activation_peaks(self, candidate: Candidate) -> tuple[ActivationPeak, ...]:
        """Return the activation peak of each rank in `distinct_ranks`."""
        c = candidate
        num_micro = self.num_micro(c)
        key = (c.micro_batch_size, c.cp, c.tp, c.ep, c.sequence, c.remat, c.pp, c.virtual, c.schedule, num_micro)
        if key not in self._activation_peaks:
            self._activation_peaks[key] = tuple(
                self.activation_peak_on_rank(c, rank, stages) for rank, stages in self.distinct_ranks(c)
            )
        return self._activation_peaks[key]

    def activation_peak_on_rank(self, candidate: Candidate, rank: int, stages: tuple[Counts, ...]) -> ActivationPeak:
        """Return the activation peak of a pipeline rank that holds these stages."""
        num_micro = self.num_micro(candidate)
        num_held = self._num_in_flight(candidate, num_micro, rank)
        return build_activation_peak(
            self.layer_costs(candidate), stages, num_held=num_held, num_total=num_micro * len(stages)
        )

    def distinct_ranks(self, candidate: Candidate) -> tuple[tuple[int, tuple[Counts, ...]], ...]:
        """Return the pipeline ranks that differ in their stages, as pairs of a rank and its stages.

        Of ranks with equal stages, return only the first. With most schedules, it holds the most activations.
        """
        c = candidate
        key = (c.pp, c.virtual, c.schedule == "zbv")
        if key not in self._ranks:
            counts = self._stage_counts(c)[0]
            rank_of_stage = find_schedule(c.schedule).placement(ranks=c.pp, virtual=c.virtual) if c.pp > 1 else (0,)
            first_ranks: dict[tuple[Counts, ...], int] = {}
            for rank in range(c.pp):
                rank_stages = tuple(
                    stage for stage, stage_rank in zip(counts, rank_of_stage, strict=True) if stage_rank == rank
                )
                first_ranks.setdefault(rank_stages, rank)
            self._ranks[key] = tuple((rank, rank_stages) for rank_stages, rank in first_ranks.items())
        return self._ranks[key]

    def elements(self, candidate: Candidate, stages: tuple[Counts, ...]) -> Elements:
        """Return the parameter counts of a rank that holds these stages."""
        key = (stages, candidate.tp, candidate.ep)
        if key not in self._elements:
            counts = tuple(map(sum, zip(*stages, strict=True)))
            self._elements[key] = count_elements(self.profile, self.chain, counts, tp=candidate.tp, ep=candidate.ep)
        return self._elements[key]

    def groups(self, candidate: Candidate) -> CommGroups:
        """Return the communication groups of a rank in the candidate's mesh."""
        c = candidate
        key = (c.pp, c.dp_replicate, c.dp_shard, c.cp, c.tp, c.ep)
        if key not in self._groups:
            shard = (c.tp * c.cp, c.dp_shard)
            replicate = (c.tp * c.cp * c.dp_shard, c.dp_replicate)
            expert_replicas = (c.tp * c.cp * c.ep, c.replicas // c.ep)
            group_axes = {
                "shard": (shard,),
                "shard_replicas": ((c.tp, c.cp), replicate),
                "data": ((c.tp, c.cp), shard, replicate),
                "expert_replicas": ((c.tp, c.cp), expert_replicas),
                "next_stage": ((c.ranks // c.pp, c.pp),),
            }
            link = self.efficiency.link
            groups = {name: build_group(self.cluster, axes, efficiency=link) for name, axes in group_axes.items()}
            host = self.cluster.host
            host = replace(host, bytes_per_second=host.bytes_per_second * link)
            self._groups[key] = CommGroups(**groups, host=host)
        return self._groups[key]

    def _stage_counts(self, candidate: Candidate) -> tuple[tuple[Counts, ...], tuple[int, ...]]:
        """Return how often each distinct part occurs in every stage, and the number of blocks of each stage."""
        num_stages = candidate.pp * candidate.virtual
        if num_stages not in self._stage_counts_cache:
            bounds = self.chain.cut_stages(num_stages)
            self._stage_counts_cache[num_stages] = (
                self.chain.stage_counts(bounds),
                tuple(stop - start for start, stop in bounds),
            )
        return self._stage_counts_cache[num_stages]

    def _num_in_flight(self, candidate: Candidate, num_micro: int, rank: int) -> int:
        """Return the largest number of activations that a pipeline rank holds at once."""
        c = candidate
        if c.pp == 1:
            return 1
        return max_in_flight(c.schedule, ranks=c.pp, micro=num_micro, virtual=c.virtual, rank=rank)
