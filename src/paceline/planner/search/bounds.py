"""Compute provable lower bounds on the seconds and bytes of every candidate below a node of the search tree.

The nodes of a level are named after the last choice that they have made: recompute, microbatch, schedule, leaf (see
`search_space`).

Bounds on the seconds. Each contains the fixed cost of a step:

- For a recompute node: all samples of a replica form one microbatch, and its work is spread evenly over the stages.
  This is a lower bound for two reasons. The cost of a layer is an affine function of the samples, or the maximum of two
  such functions, so several smaller microbatches cost at least as much. The busiest stage does at least the mean work.
- For a microbatch node: the same with the node's microbatch size. The last stage also waits for the first microbatch.
- For a schedule node: the makespan of its stages without data-parallel communication, which could only add time.
- For a leaf: the bound of its schedule node, plus the work that one rank does once per step, such as the update.

Bounds on the bytes:

- For a recompute node: the activations of the first rank, with the schedule that holds the fewest activations there.
- For a schedule node: its activations, and for each ZeRO stage the smallest possible state. The state is smallest if
  all replicas are shards and everything that may be offloaded is offloaded.
"""

from collections.abc import Iterator

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.cost.memory import estimate_memory
from paceline.planner.cost.pipeline_formulas import SPLIT_BACKWARD_SCHEDULES
from paceline.planner.cost.step_time import estimate_step_end, pipeline_seconds
from paceline.planner.search.search_space import SearchSpace


class Bounds:
    """The lower bounds for the nodes of a search space (`grid`) under a cost model."""

    def __init__(self, *, cost_model: CostModel, grid: SearchSpace) -> None:
        self._cost_model = cost_model
        self._grid = grid
        profile = cost_model.profile
        self._fixed_step_seconds = cost_model.efficiency.step_seconds
        self._global_batch_size = profile.global_batch_size

    def recompute_node_seconds(self, node: Candidate) -> float:
        """Return a lower bound on the step time of all leaves of a recompute node."""
        return self._model_seconds(self._with_one_microbatch(node)) / node.pp + self._fixed_step_seconds

    def microbatch_node_seconds(self, node: Candidate) -> float:
        """Return a lower bound on the step time of all leaves of a microbatch node.

        At best, every stage does the mean work. The last stage waits until the first microbatch has passed all other
        stages, and then computes without a pause. With v stages per rank, the wait is v times shorter. Deferred weight
        gradients can fill the whole wait.
        """
        p, num_micro = node.pp, node.num_micro(self._global_batch_size)
        microbatch_seconds = self._model_seconds(node)
        max_virtual = max(self._grid.virtual, default=1)
        fill_fraction = (1 - 1 / p) / max(2, max_virtual)
        if node.remat == "none" and node.tp == 1 and set(SPLIT_BACKWARD_SCHEDULES) & set(self._grid.schedules):
            fill_fraction = 0.0
        return microbatch_seconds * (num_micro / p + fill_fraction) + self._fixed_step_seconds

    def recompute_node_bytes(self, node: Candidate) -> float:
        """Return a lower bound on the peak bytes of all leaves of a recompute node.

        It counts only the activations of the first rank. With most schedules, this rank holds those of one microbatch
        for each pipeline rank.
        """
        cost_model, one_microbatch = self._cost_model, self._with_one_microbatch(node)
        layer_costs, samples = cost_model.layer_costs(one_microbatch), one_microbatch.micro_batch_size
        num_in_flight: float = 1 if "naive" in self._grid.schedules else min(samples, node.pp)
        if "zbv" in self._grid.schedules and node.pp > 1:
            # with few microbatches, zbv holds the activations of half a microbatch less
            num_in_flight = min(num_in_flight, node.pp - 0.5)
        least_bytes = min(
            sum(
                count * cost.kept_bytes
                for stage in cost_model.distinct_ranks(placement)[0][1]
                for count, cost in zip(stage, layer_costs, strict=True)
            )
            for placement in self._stage_placements(node)
        )
        return self._with_slack_and_reserve(least_bytes / samples * num_in_flight)

    def schedule_node_seconds(self, node: Candidate) -> float:
        """Return a lower bound on the step time of all leaves of a schedule node."""
        cost_model = self._cost_model
        hop, num_micro = cost_model.hop_seconds(node), cost_model.num_micro(node)
        return (
            pipeline_seconds(node, cost_model.stages_without_sharding(node), micro=num_micro, hop=hop)
            + self._fixed_step_seconds
        )

    def schedule_node_bytes(self, node: Candidate) -> float:
        """Return a lower bound on the peak bytes of all leaves of a schedule node."""
        return min(self._leaf_bytes(node))

    def may_fit(self, node: Candidate, limit_bytes: float) -> bool:
        """Return True if some leaf of a schedule node may fit into `limit_bytes`. Stop at the first such leaf."""
        return any(num_bytes <= limit_bytes for num_bytes in self._leaf_bytes(node))

    def _leaf_bytes(self, node: Candidate) -> Iterator[float]:
        """Yield the peak bytes of each of the `_least_memory_leaves`.

        If the activations alone need more than a device has, yield only their bytes.
        """
        cost_model = self._cost_model
        rank, stages = cost_model.distinct_ranks(node)[0]
        activations, elements = (
            cost_model.activation_peak_on_rank(node, rank, stages),
            cost_model.elements(node, stages),
        )
        least_bytes = self._with_slack_and_reserve(activations.held_bytes)
        if least_bytes > cost_model.cluster.device.memory_bytes:
            yield least_bytes
            return
        for leaf in self._least_memory_leaves(node):
            yield estimate_memory(
                leaf,
                cost_model.profile,
                elements,
                activations,
                device=cost_model.cluster.device,
                efficiency=cost_model.efficiency,
            ).peak_bytes

    def _least_memory_leaves(self, node: Candidate) -> Iterator[Candidate]:
        """Yield the leaf that needs least memory for each ZeRO stage, the highest stage first, then the node itself.

        Some of these leaves may be illegal. No legal leaf of their ZeRO stage needs less memory.
        """
        if node.replicas > 1:
            for zero in reversed(self._grid.zero):
                offload_choices = [o for o in self._grid.offload if zero == 3 or "parameters" not in o]
                offload = (
                    max(offload_choices, key=len, default=()) if self._cost_model.cluster.device.is_accelerator else ()
                )
                params = "bf16" if zero == 3 and "bf16" in self._grid.params else "fp32"
                yield node.replace(dp_replicate=1, dp_shard=node.replicas, zero=zero, offload=offload, params=params)
        yield node

    def leaf_seconds(self, leaf: Candidate, *, node_seconds: float) -> float:
        """Return a lower bound on the step time of a leaf. It omits only the sharding communication of microbatches.

        `node_seconds` is the bound of the leaf's schedule node.
        """
        cost_model = self._cost_model
        stages = cost_model.distinct_ranks(leaf)[0][1]
        end_seconds = estimate_step_end(
            leaf, cost_model.stages_without_sharding(leaf)[0], cost_model.elements(leaf, stages),
            profile=cost_model.profile, device=cost_model.cluster.device, groups=cost_model.groups(leaf),
            efficiency=cost_model.efficiency,
        )  # fmt: skip
        # both terms contain the fixed cost of a step, which counts once
        return node_seconds + sum(end_seconds.values()) - self._fixed_step_seconds

    def _model_seconds(self, node: Candidate) -> float:
        """Return the seconds of forward and backward of one microbatch, summed over the stages."""
        counted_costs = zip(self._cost_model.chain.full_counts, self._cost_model.layer_costs(node), strict=True)
        return sum(count * cost.seconds for count, cost in counted_costs)

    def _with_one_microbatch(self, node: Candidate) -> Candidate:
        """Return the node with a microbatch of all samples of a replica."""
        return node.replace(micro_batch_size=-(-self._global_batch_size // node.replicas))

    def _stage_placements(self, node: Candidate) -> list[Candidate]:
        """Return one candidate for each way to place stages on the ranks."""
        if node.pp == 1:
            return [node]
        virtual_sizes = [n for n in {1, 2, *self._grid.virtual} if node.pp * n <= self._cost_model.chain.num_blocks]
        looped = [node.replace(virtual=n, schedule="interleaved" if n > 1 else "1f1b") for n in virtual_sizes]
        return [*looped, *(candidate.replace(schedule="zbv") for candidate in looped if candidate.virtual == 2)]

    def _with_slack_and_reserve(self, num_bytes: float) -> float:
        """Return the peak bytes of a device on which tensors need `num_bytes`."""
        return num_bytes * (1 + self._cost_model.efficiency.slack) + self._cost_model.cluster.device.reserve_bytes
