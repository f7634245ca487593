"""The comparison of the samples and settings of two runs, step by step."""

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

from paceline.console.formatting import plural
from paceline.script_check.judge.rank_peers import RankPeers
from paceline.script_check.judge.script_run import ScriptRun, ScriptStep

_EQUAL = 1e-9  # relative, of learning rates and other options


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    """The first step at which two runs differ in something. `is_unequal_count`: one had more samples than the other."""

    step: int
    text: str
    hint: str = ""
    is_unequal_count: bool = False


def samples_of(step: ScriptStep, peers: RankPeers | None = None) -> Counter[int]:
    """Return how often all ranks together gave each sample to a model.

    With `peers`, what several ranks read because they share a model counts once.
    """
    counts = Counter[int]()
    for rank in range(len(step.ranks)) if peers is None else peers.counted_ranks(step):
        for (_, key), count in step.samples(rank).items():
            counts[key] += count
    return counts


def are_samples_seen(first: ScriptRun, second: ScriptRun) -> bool:
    """Return whether samples were seen in both runs."""
    return all(any(samples_of(step) for step in run.steps) for run in (first, second))


def has_sequence_pieces(first: ScriptRun, second: ScriptRun) -> bool:
    """Return whether the models of the second run get pieces of the sequences that the first one gets whole."""
    for one, many in zip(first.steps[:1], second.steps[:1], strict=False):
        shapes = [{call.row_shape for call in step.calls(0) if call.samples} for step in (one, many)]
        if len(shapes[0]) == len(shapes[1]) == 1 and shapes[0] != shapes[1]:
            whole, piece = prod(shapes[0].pop()), prod(shapes[1].pop())
            counts = one.num_samples(0), sum(many.num_samples(rank) for rank in range(len(many.ranks)))
            return piece > 0 and whole > piece and whole * counts[0] == piece * counts[1]
    return False


def sample_difference(first: ScriptRun, second: ScriptRun, names: tuple[str, str]) -> RunDifference | None:
    """Return the first step at which the runs, called `names`, had different samples; None if there is none."""
    if has_sequence_pieces(first, second):
        return None
    others = {(step.optimizer, step.number): step for step in second.steps}
    peers = RankPeers(first), RankPeers(second)
    pairs = [
        (step.number, samples_of(step, peers[0]), samples_of(others[step.optimizer, step.number], peers[1]))
        for step in first.steps
        if (step.optimizer, step.number) in others
    ]
    differing = [pair for pair in pairs if pair[1] != pair[2]]
    if not differing:
        return None
    number, one, other = differing[0]
    sizes = sum(one.values()), sum(other.values())
    if sizes[0] != sizes[1]:
        return _count_difference(number, (one, other), pairs, names, max(first.world_size, second.world_size))
    if sum((pair[1] for pair in pairs), Counter[int]()) == sum((pair[2] for pair in pairs), Counter[int]()):
        text = f"at step {number}, the samples are others; over all steps they are the same, in another order"
    else:
        common = sum((one & other).values()) / max(1, sizes[0])
        text = f"at step {number}, {common:.0%} of the samples are the same ones"
    hint = f"record {names[1]} with --batches, and {names[0]} with --feed {names[1]}"
    return RunDifference(step=number, text=text, hint=hint)


def _count_difference(
    number: int,
    samples: tuple[Counter[int], Counter[int]],
    pairs: list[tuple[int, Counter[int], Counter[int]]],
    names: tuple[str, str],
    world_size: int,
) -> RunDifference:
    """Return what is known about a step at which one run had more samples than the other."""
    sizes = [sum(each.values()) for each in samples]
    text = f"step {number} has {plural(sizes[0], 'sample')} in {names[0]}, and {sizes[1]} in {names[1]}"
    more = 0 if sizes[0] > sizes[1] else 1
    ratio = max(sizes) / max(1, min(sizes))
    counts = [(sum(pair[1].values()), sum(pair[2].values())) for pair in pairs[:-1] or pairs]
    is_always = number == 1 and all(each[more] == ratio * each[1 - more] for each in counts)
    if is_always and ratio == round(ratio) and min(sizes):
        hint = f"the same global batch in both commands: each rank's batch is 1/{round(ratio)} of that of one process"
        text += f": the batches of {names[more]} are {round(ratio)} times as large"
        return RunDifference(step=number, text=text, hint=hint, is_unequal_count=True)
    earlier = {key for step, *counted in pairs if step < number for key in counted[more]}
    if abs(sizes[0] - sizes[1]) < world_size and set(samples[more] - samples[1 - more]) <= earlier:
        text += ": filled with samples that come again, as DistributedSampler does without drop_last"
        hint = "drop_last=True in the sampler, or a number of samples that the ranks divide"
        return RunDifference(step=number, text=text, hint=hint, is_unequal_count=True)
    return RunDifference(
        step=number,
        text=f"{text}: a batch was dropped, filled or cut otherwise",
        hint="the same drop_last, and a number of samples that the ranks divide",
        is_unequal_count=True,
    )


def setting_difference(first: ScriptRun, second: ScriptRun, names: tuple[str, str]) -> RunDifference | None:
    """Return the first step at which an option of an optimizer differs, such as the learning rate."""
    others = {(step.optimizer, step.number): step for step in second.steps}
    for step in first.steps:
        other = others.get((step.optimizer, step.number))
        if other is None:
            continue
        for group, (one, two) in enumerate(zip(step.ranks[0].groups, other.ranks[0].groups, strict=False)):
            for option in one:
                if option in two and not _is_equal(one[option], two[option]):
                    text = (
                        f"at step {step.number}, {option} of parameter group {group} is {one[option]} in {names[0]},"
                        f" and {two[option]} in {names[1]}{_ratio(one[option], two[option])}"
                    )
                    return RunDifference(step=step.number, text=text, hint=_setting_hint(option, second))
    return None


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return abs(one - other) <= _EQUAL * abs(one)
    return bool(one == other)


def _ratio(one: Any, other: Any) -> str:
    are_numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (one, other))
    return f", {other / one:.4g} times as much" if are_numbers and one else ""


def _setting_hint(option: str, run: ScriptRun) -> str:
    if option != "lr":
        return "the same options of the optimizer in both commands"
    return (
        f"a learning rate that is multiplied by the {plural(run.world_size, 'rank')}, or a scheduler that steps once"
        " for each rank, is right only if it is meant"
    )
