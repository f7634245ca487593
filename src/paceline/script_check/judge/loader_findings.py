"""Findings about data loaders: batches that come again, from other workers, in a second epoch, or after a new start."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.console.formatting import plural
from paceline.script_check.judge.script_finding import ScriptFinding
from paceline.script_check.judge.script_run import ScriptRun, ScriptStep
from paceline.script_check.recording import LoaderUse

_MIN_REPEATED = 3  # steps of a second epoch that show its order, if it is not complete
_MIN_REPLAYED = 2  # batches that come again when a loader starts again
Keys = tuple[tuple[tuple[str, int], int], ...]


@dataclass(frozen=True)
class LoaderStep:
    """A step of a rank, with the use of the loader that gave its batches."""

    step: ScriptStep
    use: LoaderUse
    keys: Keys


def loader_findings(run: ScriptRun, steps: Sequence[ScriptStep]) -> Iterator[ScriptFinding]:
    """Yield what is wrong with the batches of the loaders in `steps`, which have samples, and notes on their order."""
    repeated = [*_unsplit_workers(run, steps), *_equal_workers(run, steps)]
    again = repeated or [*_replayed(run, steps)] or [*_equal_epochs(run, steps)] or [*_periods(run, steps)]
    yield from again[:1]


def loader_steps(steps: Sequence[ScriptStep], rank: int) -> list[LoaderStep]:
    """Return the steps at which the loader of the training data gave a batch: the one that does so most often."""
    uses = [(step, use) for step in steps for use in step.ranks[rank].loaders]
    numbers = [use.loader for _, use in uses]
    main = max(set(numbers), key=lambda number: (numbers.count(number), -number), default=-1)
    return [LoaderStep(step, use, _keys(step, rank)) for step, use in uses if use.loader == main]


def _keys(step: ScriptStep, rank: int) -> Keys:
    return tuple(sorted(step.samples(rank).items()))


def _replayed(run: ScriptRun, steps: Sequence[ScriptStep]) -> Iterator[ScriptFinding]:
    """Yield a note if a loader starts again before the end of its data, and gives the same batches again."""
    for rank in range(run.world_size):
        found = loader_steps(steps, rank)
        for number in sorted({each.use.passes for each in found if each.use.is_restarted}):
            before = [each for each in found if each.use.passes == number - 1]
            after = [each for each in found if each.use.passes == number]
            count = min(len(before), len(after))
            is_same = [each.keys for each in before[:count]] == [each.keys for each in after[:count]]
            if count >= _MIN_REPLAYED and is_same and len({each.keys for each in before}) == len(before):
                first, last = before[0].step.number, before[count - 1].step.number
                again = after[0].step.number, after[count - 1].step.number
                yield ScriptFinding(
                    name="replayed-samples",
                    text=f"rank {rank} reads the samples of steps {first} to {last} again at steps {again[0]} to"
                    f" {again[1]}: its data loader started again before it came to the end of the data",
                    step=again[0],
                    line=after[0].step.line("forward"),
                    hint="after a resume, skip the batches that were read already; right if epochs are cut on purpose",
                    is_note=True,
                )
                return


def _equal_epochs(run: ScriptRun, steps: Sequence[ScriptStep]) -> Iterator[ScriptFinding]:
    """Yield a note if a loader begins a second complete pass with the same epoch of its sampler."""
    for rank in range(run.world_size):
        for before, after in pairwise(loader_steps(steps, rank)):
            is_next = after.use.passes == before.use.passes + 1 and not after.use.is_restarted
            if is_next and after.use.epoch is not None and after.use.epoch == before.use.epoch:
                yield ScriptFinding(
                    name="same-order",
                    text=f"the second epoch begins with the order of the first one: set_epoch() of the sampler was not"
                    f" called between them, and it is still at epoch {after.use.epoch}",
                    step=after.step.number,
                    line=after.step.line("forward"),
                    hint="sampler.set_epoch(epoch) before each epoch",
                    is_note=True,
                )
                return


def _periods(run: ScriptRun, steps: Sequence[ScriptStep]) -> Iterator[ScriptFinding]:
    """Yield a note if the samples come back in the same order: they are not shuffled again for each epoch."""
    for rank in range(run.world_size):
        keys = [_keys(step, rank) for step in steps]
        periods = [p for p in range(1, len(keys)) if p <= len(keys) // 2 or len(keys) - p >= _MIN_REPEATED]
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


def _unsplit_workers(run: ScriptRun, steps: Sequence[ScriptStep]) -> Iterator[ScriptFinding]:
    """Yield a finding if each batch comes as often in a row as processes of a `DataLoader` read an iterable dataset.

    It is a note if the batches of one step are equal, because a script may use a batch several times on purpose.
    """
    uses = [use for step in steps for rank in step.ranks for use in rank.loaders if use.is_iterable]
    count = max((use.num_workers for use in uses), default=0)
    for rank in range(run.world_size if count > 1 else 0):
        calls = [step.calls(rank) for step in steps]
        if len({len(each) for each in calls}) > 1 or any(step.ranks[rank].num_discarded for step in steps):
            continue
        keys = [tuple(sorted(call.samples)) for each in calls for call in each]
        groups = [keys[start : start + count] for start in range(0, len(keys) - count + 1, count)]
        is_repeated = len(groups) > 1 and all(group[0] and len(set(group)) == 1 for group in groups)
        if is_repeated and len({group[0] for group in groups}) == len(groups):
            yield ScriptFinding(
                name="workers-read-the-same",
                text=f"rank {rank} reads each batch {count} times in a row: each of the {count} workers of its"
                " DataLoader reads the whole IterableDataset",
                step=steps[0].number,
                line=steps[0].line("forward"),
                hint="in __iter__ of the dataset, take only each n-th sample, by torch.utils.data.get_worker_info()",
                is_note=len(calls[0]) > 1,
            )
            return


def _equal_workers(run: ScriptRun, steps: Sequence[ScriptStep]) -> Iterator[ScriptFinding]:
    """Yield a finding if all workers of a `DataLoader` give the same samples, although each has other indices.

    Workers deal out the batches of a pass in turn. Each batch must be one that the loader gave, not one that the script
    uses again.
    """
    for rank in range(run.world_size):
        groups: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        count = 0
        for each in loader_steps(steps, rank):
            calls, use = each.step.calls(rank), each.use
            if use.is_iterable or use.num_workers < 2 or len(calls) > use.batches:
                groups.clear()
                break
            count = use.num_workers
            for number, call in enumerate(calls, start=use.last - len(calls) + 1):
                groups.setdefault((use.passes, number // count), []).append(tuple(call.samples))
        complete = [group for group in groups.values() if len(group) == count]
        is_repeated = len(complete) > 1 and all(group[0] and len(set(group)) == 1 for group in complete)
        if is_repeated and len({group[0] for group in complete}) == len(complete):
            yield ScriptFinding(
                name="workers-read-the-same",
                text=f"rank {rank} reads each batch {count} times in a row: the {count} workers of its DataLoader draw"
                " the same random numbers, as those of NumPy with one seed",
                step=steps[0].number,
                line=steps[0].line("forward"),
                hint="worker_init_fn=lambda worker: numpy.random.seed(torch.initial_seed() % 2**32), which differs for"
                " each worker and rank",
            )
            return
