"""Findings about the data: the same samples on several ranks, samples that come again, batches of unequal size."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

from paceline.console.formatting import plural
from paceline.script_check.judge.script_finding import ScriptFinding
from paceline.script_check.judge.script_run import ScriptRun, ScriptStep

_SHARED = 0.5  # share of equal samples from which on two ranks read the same ones
_SAMPLER_HINT = "sampler=DistributedSampler(dataset); or draw the samples with a seed that contains the rank"


def data_findings(run: ScriptRun) -> Iterator[ScriptFinding]:
    """Yield what is wrong with the samples of the ranks, and notes about their order."""
    steps = [step for step in run.steps if any(step.samples(rank) for rank in range(run.world_size))]
    shared = list(_shared_samples(run, steps))
    yield from shared or _overlap(run, steps)
    yield from _periods(run, steps)


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
            text=f"ranks {first} and {second} read the same samples, at {len(shared)} of {plural(len(judged), 'step')}"
            + (", as they must where ranks share the parts of a weight" if is_tensor_parallel else ""),
            step=shared[0].number,
            line=shared[0].line("forward"),
            hint="" if is_tensor_parallel else _SAMPLER_HINT,
            is_note=is_tensor_parallel,
        )
        return


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


def _periods(run: ScriptRun, steps: Sequence[ScriptStep]) -> Iterator[ScriptFinding]:
    """Yield a note if the samples come back in the same order: they are not shuffled again for each epoch."""
    for rank in range(run.world_size):
        keys = [tuple(sorted(step.samples(rank).items())) for step in steps]
        periods = range(1, len(keys) // 2 + 1)
        period = next((p for p in periods if keys[0] and all(a == b for a, b in zip(keys, keys[p:], strict=False))), 0)
        if period:
            text = f"rank {rank} reads the same samples in the same order every {plural(period, 'step')}"
            yield ScriptFinding(
                name="same-order",
                text=text,
                step=steps[period].number,
                line=steps[period].line("forward"),
                hint="shuffle=True and sampler.set_epoch(epoch); right for a run that overfits one batch on purpose",
                is_note=True,
            )
            return


def has_unequal_counts(run: ScriptRun) -> bool:
    """Return whether ranks had different numbers of samples at some step."""
    return any(len({step.num_samples(rank) for rank in range(run.world_size)}) > 1 for step in run.steps)


def has_repeated_samples(run: ScriptRun) -> bool:
    """Return whether a sample came again at a later step, so that an epoch has probably ended."""
    total = Counter[tuple[str, int]]()
    for step in run.steps:
        total.update(set(step.samples(0)))
    return any(count > 1 for count in total.values())
