"""Findings about the data: the same samples on several ranks, and batches of unequal size."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

from paceline.console.formatting import plural
from paceline.script_check.judge.loader_findings import loader_findings
from paceline.script_check.judge.rank_peers import RankPeers
from paceline.script_check.judge.reduction import StepReduction
from paceline.script_check.judge.script_finding import ScriptFinding
from paceline.script_check.judge.script_run import ScriptRun, ScriptStep

_SHARED = 0.5  # share of equal samples from which on two ranks read the same ones
_UNEQUAL_TARGETS = 0.02  # relative, of counts of targets that are worth a note
_SAMPLER_HINT = "sampler=DistributedSampler(dataset); or draw the samples with a seed that contains the rank"


def data_findings(run: ScriptRun, reductions: Sequence[StepReduction]) -> Iterator[ScriptFinding]:
    """Yield what is wrong with the samples of the ranks, and notes about their order."""
    steps = [step for step in run.steps if any(step.samples(rank) for rank in range(run.world_size))]
    shared = list(_shared_samples(run, steps))
    yield from shared or _overlap(run, steps)
    yield from _other_samples_of_peers(run, steps)
    yield from loader_findings(run, steps)
    yield from _unequal_counts(run, reductions)


def _shared_samples(run: ScriptRun, steps: Sequence[ScriptStep]) -> Iterator[ScriptFinding]:
    """Yield a finding if two ranks read the same samples, or a note where ranks share a replica of the model."""
    for first, second in combinations(range(run.world_size), 2):
        judged = [step for step in steps if len(step.samples(first)) > 1 or len(step.samples(second)) > 1]
        shared = [step for step in judged if _shared_share(step, first, second) > _SHARED]
        if len(shared) * 2 <= len(judged) or not shared:
            continue
        is_tensor_parallel = run.sharding == "tensor"
        yield ScriptFinding(
            name="same-samples",
            text=f"{_who(run, shared, first, second)} read the same samples, at {len(shared)} of"
            f" {plural(len(judged), 'step')}"
            + (", as they must where ranks share the parts of a weight" if is_tensor_parallel else ""),
            step=shared[0].number,
            line=shared[0].line("forward"),
            hint="" if is_tensor_parallel else _SAMPLER_HINT,
            is_note=is_tensor_parallel,
        )
        return


def _other_samples_of_peers(run: ScriptRun, steps: Sequence[ScriptStep]) -> Iterator[ScriptFinding]:
    """Yield a finding if a rank shares no samples with any rank that has other parts of the same DTensors."""
    peers = RankPeers(run)
    ranks = range(run.world_size) if run.sharding == "tensor" else range(0)
    for step in steps:
        for rank in ranks:
            others = [other for other in ranks if other != rank and peers.share_model(rank, other)]
            if others and step.samples(rank) and all(_shared_share(step, rank, other) < _SHARED for other in others):
                yield ScriptFinding(
                    name="peers-read-otherwise",
                    text=f"ranks {rank} and {others[0]} have parts of the same weights, as in tensor parallelism, and"
                    " read different samples: each computes its part of other activations",
                    step=step.number,
                    line=step.line("forward"),
                    hint="give all ranks of a tensor parallel group the same batches: a sampler and its seed by the"
                    " data parallel rank",
                )
                return


def _who(run: ScriptRun, steps: Sequence[ScriptStep], first: int, second: int) -> str:
    """Return words for the ranks that read the same samples as `first`."""
    others = [rank for rank in range(run.world_size) if rank != first]
    if len(others) > 1 and all(_shared_share(step, first, rank) > _SHARED for step in steps for rank in others):
        return f"all {run.world_size} ranks"
    return f"ranks {first} and {second}"


def _shared_share(step: ScriptStep, first: int, second: int) -> float:
    one, two = step.samples(first), step.samples(second)
    return sum((one & two).values()) / max(1, min(sum(one.values()), sum(two.values())))


def _overlap(run: ScriptRun, steps: Sequence[ScriptStep]) -> Iterator[ScriptFinding]:
    """Yield a note if ranks read the same samples at different steps, before one of them has read a sample twice."""
    if run.sharding == "tensor" or run.world_size < 2:
        return
    seen: list[set[tuple[str, int]]] = [set() for _ in range(run.world_size)]
    for step in steps:
        samples = [step.samples(rank) for rank in range(run.world_size)]
        if any(max(each.values(), default=0) > 1 or seen[rank] & set(each) for rank, each in enumerate(samples)):
            break
        for rank, each in enumerate(samples):
            seen[rank] |= set(each)
    common = len(seen[0] & seen[1])
    if common > run.world_size:  # a sampler may repeat a few to fill the last batches
        yield ScriptFinding(
            name="common-samples",
            text=f"ranks 0 and 1 have {plural(common, 'sample')} in common, of {len(seen[0])} that rank 0 read before"
            " one came again",
            step=steps[0].number,
            line=steps[0].line("forward"),
            hint=f"{_SAMPLER_HINT}; right where samples are drawn at random, or repeated on purpose",
            is_note=True,
        )


def _unequal_counts(run: ScriptRun, reductions: Sequence[StepReduction]) -> Iterator[ScriptFinding]:
    """Yield a note if batches of unequal size count alike, so that the gradient is no mean over all samples."""
    others = {id(each.step) for each in reductions if each.total.kind not in ("mean", "scaled", "by-parameter")}
    judged = {id(each.step) for each in reductions} - others
    for step in run.steps:
        unit, counts = _counts(step)
        if id(step) not in judged or run.world_size < 2 or not counts:
            continue
        totals = [sum(of_rank) for of_rank in counts]
        passes = {len(each) for rank in step.ranks for each in rank.own_gradients.values()}
        has_passes = passes == {len(of_rank) for of_rank in counts} != {1}
        values = [count for of_rank in counts for count in of_rank] if has_passes else totals
        if min(values) < (1 - _UNEQUAL_TARGETS if unit == "targets" else 1) * max(values):
            where = "the ranks and backward passes" if has_passes else "the ranks"
            yield ScriptFinding(
                name="unequal-counts",
                text=f"{where} have {min(values)} to {max(values)} {unit} each, and their gradients count alike: if"
                f" each loss is a mean, a mean of means is not the mean over all {unit}",
                step=step.number,
                line=step.line("forward"),
                hint="divide the sum of the losses by the mean count of all ranks; right if the loss does that already",
                is_note=True,
            )
            return


def _counts(step: ScriptStep) -> tuple[str, list[list[int]]]:
    """Return a unit and the counts of each rank's calls of the first model; no counts if the loss knows them."""
    first = next((call.module for rank in range(len(step.ranks)) for call in step.calls(rank) if call.samples), "")
    calls = [
        [call for call in step.calls(rank) if call.module == first and call.samples] for rank in range(len(step.ranks))
    ]
    if not all(calls) or any(call.is_weighted for of_rank in calls for call in of_rank):
        return "", []
    if all(call.num_targets for of_rank in calls for call in of_rank):
        return "targets", [[call.num_targets for call in of_rank] for of_rank in calls]
    return "samples", [[call.num_samples for call in of_rank] for of_rank in calls]


def has_unequal_counts(run: ScriptRun) -> bool:
    """Return whether ranks had different numbers of samples at some step."""
    return any(len({step.num_samples(rank) for rank in range(run.world_size)}) > 1 for step in run.steps)


def has_repeated_samples(run: ScriptRun) -> bool:
    """Return whether a sample came again at a later step, so that an epoch has probably ended."""
    total = Counter[tuple[str, int]]()
    for step in run.steps:
        total.update(set(step.samples(0)))
    return any(count > 1 for count in total.values())
