"""The third rung: both run freely for some steps, then what came out is compared, and evaluated."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from paceline.feed.apart import read_apart
from paceline.feed.stream import checksum
from paceline.order.cursor import Cursor
from paceline.place.views import write
from paceline.prove.alone import alone
from paceline.prove.finding import DIFFERENT, Finding, judged
from paceline.prove.lockstep import Say, feed_of
from paceline.prove.noise import MARGIN, can_nudge, distance, nudge
from paceline.prove.reference import At, Reference
from paceline.spec.words import many
from paceline.step.sites import Sites
from paceline.streams import key, seed_all
from paceline.train.apart import tensors_of
from paceline.train.built import Built
from paceline.train.evaluate import Evaluated, Evaluator
from paceline.train.replicas import averaged, first_apart
from paceline.train.sites import mean_in_place, sites_of

Contents = dict[tuple[int, int], int]  # by step and microbatch
_EVALUATED_BATCHES = 4
_METRIC = 1e-6


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How far weights may be apart, as a share of the way that training has gone, and what more would come from."""

    share: float = 1e-3
    cause: str = "the runs part over several steps though each step alone agrees: optimizer state or schedule"


def run_free(built: Built, *, reference: Reference | None, steps: int, say: Say, drift: Drift | None = None) -> Finding:
    """Compare the weights after `steps` steps, with the drift of a disturbed one-process run as the floor."""
    finding = Finding()
    start: dict[str, Tensor] = {}
    right_losses: list[float] = []
    right_contents: Contents = {}
    if reference is not None:
        start = {name: tensor.clone() for name, tensor in trained(reference).items()}
        right_losses = _alone(reference, steps, backwards=False, contents=right_contents)
    steps = built.world.share_json(len(right_losses))
    say(many(steps, "step"))
    contents: Contents = {}
    results = [built.step.run(given) for given in first_batches(built, steps, contents)]
    built.step.settle()
    losses = [result.loss for result in results]
    _see_contents(finding, built, contents, right_contents)
    apart = first_apart(built)
    if apart is not None:
        finding.blame(step=steps, parameter=apart.name, cause=f"the replicas are no longer equal: {apart}")
    weights = of_layout(built)
    with mean_in_place(built):
        evaluated, kept = evaluated_by(built), listed(built)
    if reference is not None and steps:
        other = reference.again()
        if can_nudge(other.bare(), at=At(step=0, epoch=0, position=0), seed=1):
            nudge(other.model, seed=1)
        _alone(other, steps, backwards=True)
        judge(finding, weights, reference, other, start, steps, drift or Drift())
        finding.detail = f"Loss {losses[-1]:.6g} beside {right_losses[-1]:.6g} after {many(steps, 'step')}."
        if evaluated is None and built.job.eval_data is not None:
            finding.detail += " The evaluation was not compared: eval_data is a stream, or has a sampler of its own."
        if evaluated is not None:
            judge_evaluation(finding, built, reference, evaluated, steps, kept)
    found: Finding = Finding(**built.world.share_json(vars(finding)))
    return found


def first_batches(built: Built, steps: int, contents: Contents) -> Any:
    """The run's first batches, one after another; what is in them is noted in `contents`."""
    feed = feed_of(built, Cursor())
    try:
        for given in islice(iter(feed), steps):
            contents |= {(given.batch.after.step, micro.index): checksum(micro.data, 0) for micro in given.micro}
            yield given
    finally:
        feed.close()


def _see_contents(finding: Finding, built: Built, mine: Contents, right: Contents) -> None:
    """Only here does a feed go on from batch to batch, with whatever its data workers hold."""
    rows = built.world.gather_json([[*place, content] for place, content in mine.items()])
    found = {(step, index): content for row in rows for step, index, content in row}
    for (step, index), content in sorted(right.items()):
        if found.get((step, index), content) != content:
            cause = (
                f"data: the right samples with other contents in microbatch {index}, though read alone it is right: "
                "a dataset or collation that asks for the data worker, or keeps something from sample to sample"
            )
            finding.blame(step=step, parameter="(data)", cause=cause)
            return


def _alone(reference: Reference, steps: int, *, backwards: bool, contents: Contents | None = None) -> list[float]:
    """One process; it ends before a step that has no finite gradient."""
    at, losses = At(step=0, epoch=0, position=0), []
    for _ in range(steps):
        pieces = reference.pieces(at)
        if contents is not None:
            contents |= {(at.number, index): checksum(piece.data, 0) for index, piece in enumerate(pieces)}
        gradient = reference.gradient(at, pieces=pieces, backwards=backwards)
        if not all(bool(torch.isfinite(value).all()) for value in gradient.total.values()):
            break
        reference.update(gradient.total)
        losses.append(gradient.loss)
        at = reference.after(at, sum(len(part) for part in gradient.samples))
    return losses


def judge(
    finding: Finding,
    found: Mapping[str, Tensor],
    reference: Reference,
    disturbed: Reference,
    start: Mapping[str, Tensor],
    steps: int,
    drift: Drift,
) -> None:
    """Drift is measured against what a disturbance does, and against how far training has moved the tensor at all."""
    right, other = trained(reference), trained(disturbed)
    bad: dict[str, float] = {}
    for name, weight in found.items():
        apart = distance(weight, right[name])
        floor = max(MARGIN * distance(other[name], right[name]), drift.share * distance(right[name], start[name]))
        verdict = judged(apart, floor)
        finding.note(verdict, difference=apart, floor=floor)
        if verdict == DIFFERENT:
            bad[name] = apart / max(floor, 1e-300)
    finding.count("weights", len(right) - len(reference.average.tensors))
    if reference.average.tensors:
        finding.count("averages", len(reference.average.tensors))
    if bad:
        name = max(bad, key=lambda key: bad[key])
        weights = any(name in bad for name in reference.weights())
        average = "the weights agree and their average does not: another decay, or steps left out"
        cause = drift.cause if weights else average
        finding.blame(step=steps, parameter=name, cause=f"{cause} ({len(bad)} of {len(right)})")


def trained(reference: Reference) -> dict[str, Tensor]:
    """Weights, and their averages, which are what is evaluated and handed over."""
    average = reference.average.tensors
    return reference.weights() | dict(zip(averaged(list(average)), average.values(), strict=True))


def of_layout(built: Built) -> dict[str, Tensor]:
    """Weights and their averages, whole."""
    holding, ema = built.weights, built.update.ema
    mine = {name: held.tensor for name, held in holding.mine.items() if name in holding.parameters}
    found = {name: holding.whole(name, tensor) for name, tensor in mine.items()}
    sites = sites_of(built)
    if sites is not None:
        return _of_sites(found, built, sites)
    if ema is not None:
        averages = dict(zip(ema.names, ema.averages, strict=True))
        names = [name for name in mine if holding.mine[name].dtype.is_floating_point]
        found |= {
            new: holding.whole(name, averages.get(name)) for name, new in zip(names, averaged(names), strict=True)
        }
    return found


def _of_sites(own: Mapping[str, Tensor], built: Built, sites: Sites) -> dict[str, Tensor]:
    """Every site's, and what they have agreed on."""
    found: dict[str, Tensor] = {}
    for name, tensor in own.items():
        for site in range(sites.peers.world_size):
            found[f"{name} of site {site}"] = sites.peers.broadcast(tensor.clone(), source=site)
    agreed = {m.name: a.detach() for f in sites.fragments for m, a in zip(f.members, f.agreed, strict=True)}
    for name in built.kept.names:
        found[f"{name} as agreed"] = built.kept.whole(name, agreed.get(name))
    return found


def listed(built: Built) -> dict[str, Tensor]:
    """What the `state_dict` lists, whole; of experts a rank's own lists some."""
    holding = built.weights
    told = {name for names in built.world.gather_json(list(tensors_of(built.model))) for name in names}
    return {name: holding.whole(name, holding.mine[name].tensor) for name in holding.names if name in told}


def evaluated_by(built: Built) -> Evaluated | None:
    """The layout's own evaluation of a few batches."""
    data = _some(built.job.eval_data, built)
    if data is None:
        return None
    evaluator = Evaluator(built)
    size = built.plan.micro_batch_size
    return evaluator.run(data, batch_size=size, name="eval_data")


def _some(data: Any, built: Built) -> Any:
    """A part of the split that does not divide by the ranks; of a DataLoader, what it reads from and its collation."""
    if isinstance(data, type) or (callable(data) and not hasattr(data, "__getitem__")):
        data = data()
    if isinstance(data, DataLoader):
        plain = isinstance(data.sampler, SequentialSampler | RandomSampler | DistributedSampler)
        part = _some(data.dataset, built) if plain and not getattr(data.sampler, "replacement", False) else None
        return part and DataLoader(part, batch_size=data.batch_size, collate_fn=data.collate_fn)
    is_stream = isinstance(data, IterableDataset)
    if is_stream or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return None
    size = built.plan.micro_batch_size
    total = read_apart(built.data.split(data, name="eval_data"), lambda: len(data))
    return Subset(data, range(min(total, _EVALUATED_BATCHES * built.world.world_size * size + 1))) if total else None


def judge_evaluation(
    finding: Finding,
    built: Built,
    reference: Reference,
    evaluated: Evaluated,
    steps: int,
    theirs: Mapping[str, Tensor],
) -> None:
    """One process evaluates the layout's own weights: each sample once, sums over sums of counts."""
    with torch.no_grad():
        for name, tensor in tensors_of(reference.model).items():
            if name in theirs:  # a tied one under its first name
                write(tensor, theirs[name])
    right, samples = _by_hand(built, reference)
    if samples != evaluated.samples:
        cause = f"evaluation saw {evaluated.samples} samples for {samples}"
        finding.blame(step=steps, parameter="(evaluation)", cause=cause)
    for name, value in right.items():
        found = evaluated.metrics.get(name, math.nan)
        finding.count("metrics", 1)
        if not math.isclose(found, value, rel_tol=_METRIC, abs_tol=_METRIC) and not (
            math.isnan(found) and math.isnan(value)
        ):
            cause = (
                f"evaluation: {name} is {found:.6g} for {value:.6g} at equal weights: another mean, or samples left out"
            )
            finding.blame(step=steps, parameter="(evaluation)", cause=cause)


def batches_of(data: Any, size: int, collate: Callable[[list[Any]], Any]) -> list[tuple[Any, int]]:
    """Every batch of a small split, with how many samples it has."""
    parts = [range(start, min(start + size, len(data))) for start in range(0, len(data), size)]
    return [(collate([data[i] for i in part]), len(part)) for part in parts]


def _by_hand(built: Built, reference: Reference) -> tuple[dict[str, float], int]:
    data, size = _some(built.job.eval_data, built), built.plan.micro_batch_size
    collate = built.job.collate or torch.utils.data.default_collate
    if isinstance(data, DataLoader):
        collate = built.job.collate or data.collate_fn
        data = data.dataset
    sums: dict[str, list[float]] = {}
    metrics = {n: m for n, m in (built.job.metrics or {}).items() if not hasattr(m, "compute")}
    reference.model.eval()
    seed_all(key(built.settings.seed, "evaluate"))
    with torch.no_grad(), alone():
        for batch, rows in read_apart(
            built.data.split(data, name="eval_data"), lambda: batches_of(data, size, collate)
        ):
            batch = reference.cast(batch)
            output, terms = reference.terms_of(batch, rows)
            pairs = {(name if len(terms) == 1 else f"loss/{name}"): pair for name, pair in terms.items()}
            with reference.precision():
                pairs |= {name: metric(output, batch) for name, metric in metrics.items()}
            for name, pair in pairs.items():
                total = sums.setdefault(name, [0.0, 0.0])
                total[0], total[1] = total[0] + float(pair[0]), total[1] + float(pair[1])
    return {name: total / count if count else math.nan for name, (total, count) in sums.items()}, len(data)
