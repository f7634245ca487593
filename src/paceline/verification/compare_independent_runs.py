"""The third rung: the layout and one process run freely for some steps; then weights and evaluation are compared."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.state_outside_state_dict import tensors_of
from paceline.console.formatting import plural
from paceline.data.dataset_properties import spread_checksums
from paceline.data.order.cursor import Cursor
from paceline.data.stream.iterable_loader import checksum
from paceline.step.local_sgd.fragment_schedule import FragmentSchedule
from paceline.trainer.diagnostics.replica_check import averaged_names, find_replica_mismatch
from paceline.trainer.local_sgd_state import get_sites
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.verification.compare_evaluation import evaluated_by, judge_evaluation
from paceline.verification.compare_in_lockstep import Say, feed_of, unmoved_weights_note
from paceline.verification.noise_floor import can_disturb, disturb_reference, margin_of
from paceline.verification.reference.reference import Reference, RunPosition
from paceline.verification.rung_result import DIFFERENT, RungResult, verdict_of_distance
from paceline.verification.tensor_distance import eps_of, euclidean_distance, euclidean_norm

_RUNS = 6
_MOST_SAMPLES, _SECONDS = 64, 1.0  # read from all over the dataset
Contents = dict[tuple[int, int], int]  # checksums by step and microbatch


@dataclass(frozen=True, kw_only=True)
class WeightDrift:
    """The allowed drift of weights, as a share of how far training moved them, and the likely cause of more."""

    share: float = 1e-3
    cause: str = "the runs diverge over several steps although each single step agrees: optimizer state or schedule"


def run_free(
    built: TrainingSetup, *, reference: Reference | None, steps: int, say: Say, drift: WeightDrift | None = None
) -> RungResult:
    """Compare the weights after `steps` steps, with the drift of a disturbed one-process run as the floor."""
    rung_result, asked = RungResult(), steps
    start: dict[str, Tensor] = {}
    right_losses: list[float] = []
    right_contents: Contents = {}
    if reference is not None:
        start = {name: tensor.clone() for name, tensor in kept_by(reference).items()}
        right_losses = _alone(reference, steps, backwards=False, contents=right_contents)
    steps = built.world.share_json(len(right_losses))
    say(plural(steps, "step"))
    contents: Contents = {}
    results = [built.step.run(given) for given in first_batches(built, steps, contents)]
    built.step.settle()
    losses = [result.loss for result in results]
    _see_contents(rung_result, built, contents, right_contents)
    apart = find_replica_mismatch(built)
    if apart is not None:
        rung_result.blame(step=steps, parameter=apart.name, cause=f"the replicas are no longer equal: {apart}")
    weights = of_layout(built) | buffers_of(built)
    with built.step.synchronised_weights():
        evaluated, kept = evaluated_by(built), state_dict_tensors(built)
    if reference is not None and steps < asked:
        why = "one process has no finite gradient there, or a term without targets"
        rung_result.leave_out(f"step {steps + 1} and later: {why}")
    if reference is not None and steps:
        judge_drift(
            rung_result, weights, reference, partial(_disturbed, reference, steps), start, steps, drift or WeightDrift()
        )
        rung_result.detail = f"Loss {losses[-1]:.6g} against {right_losses[-1]:.6g} after {plural(steps, 'step')}."
        if evaluated is None and built.job.eval_data is not None:
            rung_result.detail += " The evaluation was not compared: eval_data is a stream, or has its own sampler."
        if evaluated is not None:
            judge_evaluation(rung_result, built, reference, evaluated, steps, kept)
    _see_other_samples(rung_result, built)
    found: RungResult = RungResult(**built.world.share_json(vars(rung_result)))
    return found


def first_batches(built: TrainingSetup, steps: int, contents: Contents) -> Any:
    """Yield the run's first batches, and record checksums of their data in `contents`."""
    feed = feed_of(built, Cursor())
    try:
        for given in islice(iter(feed), steps):
            contents |= {(given.batch.after.step, micro.index): checksum(micro.data, 0) for micro in given.micro}
            yield given
    finally:
        feed.close()


def _see_contents(rung_result: RungResult, built: TrainingSetup, mine: Contents, right: Contents) -> None:
    """Compare the data of consecutive batches. Only a free run exposes state that data workers keep between batches."""
    rows = built.world.gather_json([[*place, content] for place, content in mine.items()])
    found = {(step, index): content for row in rows for step, index, content in row}
    for (step, index), content in sorted(right.items()):
        if found.get((step, index), content) != content:
            cause = (
                f"data: the right samples with different contents in microbatch {index}, which is "
                "right when read alone: "
                "a dataset or collation that depends on the data worker, or keeps state between samples"
            )
            rung_result.blame(step=step, parameter="(data)", cause=cause)
            return


def _see_other_samples(rung_result: RungResult, built: TrainingSetup) -> None:
    """Compare samples from all over the dataset between the ranks; the compared steps read only a small part of it."""
    source, seed, world = built.data.train, built.settings.seed, built.world
    if world.world_size == 1 or not source.is_indexed:
        return
    read = partial(spread_checksums, source, seed=seed, most=_MOST_SAMPLES, seconds=_SECONDS)
    first = read(chosen=None) if world.is_main else None
    chosen = world.share_json(None if first is None else first[0])
    found = read(chosen=chosen)[1]
    is_same = all(world.gather_json(first is None or first[1] == found))
    for index, *values in zip(chosen, *world.gather_json(found), strict=True):
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None and is_same:
            cause = (
                f"data: sample {index} differs between rank {other} and rank 0, in data that the compared steps did "
                "not read: a dataset that depends on the rank, or other files there"
            )
            rung_result.blame(step=1, parameter="(data)", cause=cause)
            return


def _alone(reference: Reference, steps: int, *, backwards: bool, contents: Contents | None = None) -> list[float]:
    """Run one process and return its losses; stop before a non-finite gradient or a term without a target."""
    at, losses = RunPosition(step=0, epoch=0, position=0), []
    for _ in range(steps):
        pieces = reference.pieces(at)
        if contents is not None:
            contents |= {(at.number, index): checksum(piece.data, 0) for index, piece in enumerate(pieces)}
        before = reference.statistics()
        gradient = reference.gradient(at, pieces=pieces, backwards=backwards)
        if gradient.empty or not all(bool(torch.isfinite(value).all()) for value in gradient.total.values()):
            reference.skip(before)
            break
        reference.update(gradient.total)
        losses.append(gradient.loss)
        at = reference.after(at, sum(len(part) for part in gradient.samples))
    return losses


def _disturbed(reference: Reference, steps: int, seed: int) -> dict[str, Tensor]:
    """Return the tensors after a run from weights moved by rounding, with the microbatches in reverse order.

    Buffers come from a run in the usual order, because running statistics depend on it.
    """
    found: dict[str, Tensor] = {}
    for backwards in (True, False) if _buffers(reference) else (True,):
        other = reference.again()
        if can_disturb(other.bare(), at=RunPosition(step=0, epoch=0, position=0), seed=seed):
            disturb_reference(other, seed=seed)
        _alone(other, steps, backwards=backwards)
        found |= trained_tensors(other) | _buffers(other) if backwards else _buffers(other)
    return found


def judge_drift(
    rung_result: RungResult,
    found: Mapping[str, Tensor],
    reference: Reference,
    disturbed: Callable[[int], Mapping[str, Tensor]],
    start: Mapping[str, Tensor],
    steps: int,
    drift: WeightDrift,
) -> None:
    """Judge the drift against that of disturbed runs, and against how far training has moved the tensor.

    More disturbed runs precede a verdict of different: under rules such as Adam's, an element whose gradient is almost
    zero moves up or down by a whole step, and a single disturbance may leave it unchanged.
    """
    right = kept_by(reference)
    apart = {name: euclidean_distance(tensor, right[name]) for name, tensor in found.items()}
    ways = {name: euclidean_distance(right[name], start[name]) for name in found}
    floors = {n: max(drift.share * ways[n], _rounded(t, right[n], steps)) for n, t in found.items()}
    for seed in range(1, 1 + _RUNS):
        other = disturbed(seed)
        floors = {n: max(floors[n], margin_of(t) * euclidean_distance(other[n], right[n])) for n, t in found.items()}
        if not any(verdict_of_distance(apart[name], floors[name]) == DIFFERENT for name in found):
            break
    bad: dict[str, float] = {}
    for name, floor in floors.items():
        verdict = verdict_of_distance(apart[name], floor)
        rung_result.note(verdict, difference=apart[name], floor=floor)
        if verdict == DIFFERENT:
            bad[name] = apart[name] / max(floor, 1e-300)
    moved = {name: way > 0.0 for name, way in ways.items() if name in reference.weights()}
    averages, buffers = len(reference.average.tensors), len(found.keys() & _buffers(reference).keys())
    rung_result.count("weights", len(found) - averages - buffers)
    for kind, number in (("averages", averages), ("buffers", buffers)):
        if number:
            rung_result.count(kind, number)
    if not any(moved.values()):
        rung_result.leave_out(unmoved_weights_note(moved, steps=steps, rises=False))
    if bad:
        name = max(bad, key=lambda key: bad[key])
        weights = any(name in bad for name in reference.weights())
        average = "the weights agree but their average does not: a different decay, or skipped steps"
        buffer = (
            "the weights agree but a buffer does not, although it agrees in each single step: it "
            "is written between steps"
        )
        cause = drift.cause if weights else buffer if name in _buffers(reference) else average
        rung_result.blame(step=steps, parameter=name, cause=f"{cause} ({len(bad)} of {len(found)})")


def _rounded(tensor: Tensor, right: Tensor, steps: int) -> float:
    """Return the rounding of half precision, which each step may add to each element."""
    return eps_of(tensor) * euclidean_norm(right) * steps**0.5 if tensor.dtype.itemsize < 4 else 0.0


def trained_tensors(reference: Reference) -> dict[str, Tensor]:
    """Return the weights and their averages, which are evaluated and handed over."""
    average = reference.average.tensors
    return reference.weights() | dict(zip(averaged_names(list(average)), average.values(), strict=True))


def kept_by(reference: Reference) -> dict[str, Tensor]:
    """Return the reference's weights, averages and buffers."""
    return trained_tensors(reference) | _buffers(reference)


def _buffers(reference: Reference) -> dict[str, Tensor]:
    return {name: buffer.detach() for name, buffer in reference.model.named_buffers()}


def buffers_of(built: TrainingSetup) -> dict[str, Tensor]:
    """Return the layout's whole buffers; none for sites, whose own buffers are compared where they meet."""
    if get_sites(built) is not None:
        return {}
    holding = built.weights
    names = [name for name in holding.names if name not in holding.parameters]
    return {name: holding.whole(name, holding.mine[name].tensor) for name in names}


def of_layout(built: TrainingSetup) -> dict[str, Tensor]:
    """Return the layout's whole weights and their averages."""
    holding, ema = built.weights, built.update.ema
    mine = {name: held.tensor for name, held in holding.mine.items() if name in holding.parameters}
    found = {name: holding.whole(name, tensor) for name, tensor in mine.items()}
    sites = get_sites(built)
    if sites is not None:
        return _of_sites(found, built, sites)
    if ema is not None:
        averages = dict(zip(ema.names, ema.averages, strict=True))
        names = [name for name in mine if holding.mine[name].dtype.is_floating_point]
        found |= {
            new: holding.whole(name, averages.get(name)) for name, new in zip(names, averaged_names(names), strict=True)
        }
    return found


def _of_sites(own: Mapping[str, Tensor], built: TrainingSetup, sites: FragmentSchedule) -> dict[str, Tensor]:
    """Return every site's weights, and the weights that the sites agreed on."""
    found: dict[str, Tensor] = {}
    for name, tensor in own.items():
        for site in range(sites.peers.world_size):
            found[f"{name} of site {site}"] = sites.peers.broadcast(tensor.clone(), source=site)
    agreed = {m.name: a.detach() for f in sites.fragments for m, a in zip(f.members, f.agreed, strict=True)}
    for name in built.kept.names:
        found[f"{name} as agreed"] = built.kept.whole(name, agreed.get(name))
    return found


def state_dict_tensors(built: TrainingSetup) -> dict[str, Tensor]:
    """Return the whole tensors that any rank's `state_dict` lists; with expert parallelism each lists only some."""
    holding = built.weights
    told = {name for names in built.world.gather_json(list(tensors_of(built.model))) for name in names}
    return {name: holding.whole(name, holding.mine[name].tensor) for name in holding.names if name in told}
