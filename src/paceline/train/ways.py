"""What a job's parts hold under each way of recomputation, and what tp leaves of it: seen, on memory without numbers."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import pairwise
from typing import Any

import torch

from paceline.job import Job
from paceline.measure.hollow import Hollow
from paceline.measure.lives import Life, Lives
from paceline.plan.facts import Holding, Way
from paceline.spec.settings import Settings
from paceline.step.passes import backward, forward
from paceline.streams import preserved
from paceline.torch_modes import nobody_there
from paceline.train.built import build
from paceline.train.imagined import Scene
from paceline.train.samples import FEW, MORE, amount_through, length_of, lengths_of, plan_of, samples_of, shortened
from paceline.train.shallow import blocks_of

REMATS = ("none", "selective", "full")
_Seen = Mapping[str, Life]


def ways_of(job: Job, settings: Settings, *, tp_sizes: Sequence[int]) -> dict[str, dict[str, Way]]:
    """By part, then by `remat`; one that the model can't have is not there."""
    length, found = length_of(job, settings), dict[str, dict[str, Way]]()
    for remat in REMATS:
        with suppress(Exception):  # what can't be had is refused where it is asked for
            alone = "single" if remat == "none" else f"dp=1,remat={remat}"
            each = [_lives(job, settings, alone, 1, samples=n) for n in (FEW, MORE)]
            each += [_lives(job, settings, alone, 1, samples=FEW, length=n) for n in lengths_of(length)]
            splits = [_splits(job, settings, remat, tp_sizes, sequence=sequence) for sequence in (False, True)]
            for name in each[0]:
                kept, moment = (
                    _holding([getattr(seen[name], what) for seen in each], length, [
                        {size: getattr(seen[name], what) for size, seen in split.items()} for split in splits
                    ])
                    for what in ("kept_bytes", "moment_bytes")
                )  # fmt: skip
                found.setdefault(name, {})[remat] = Way(kept=kept, moment=moment)
    return found


def _splits(job: Job, settings: Settings, remat: str, tp_sizes: Sequence[int], *, sequence: bool) -> dict[int, _Seen]:
    """On two and on four ranks, where the model can be split so."""
    found = {}
    for size in (size for size in tp_sizes if size <= 4):
        words = f"tp={size},remat={remat}{',sequence=true' if sequence else ''}"
        with suppress(Exception):
            found[size] = _lives(job, settings, words, size, samples=FEW)
    return found


def _holding(values: Sequence[float], length: int | None, splits: Sequence[Mapping[int, float]]) -> Holding:
    (whole, cut), (sequence_whole, sequence_cut) = (_parts(values[0], split) for split in splits)
    return Holding(
        amount=amount_through(values, length),
        whole=whole, cut=cut, sequence_whole=sequence_whole, sequence_cut=sequence_cut,
    )  # fmt: skip


def _parts(alone: float, split: Mapping[int, float]) -> tuple[float, float]:
    """Parts of what one rank alone holds: what stays on each, and what is divided."""
    sizes = sorted(split)
    if not alone or not sizes:
        return 0.0, 1.0
    if len(sizes) == 1:
        cut = 2 * (1 - split[sizes[0]] / alone)
        return 1 - cut, cut
    ((few, more),) = pairwise(sizes[:2])
    cut = (split[few] - split[more]) / alone / (1 / few - 1 / more)
    return split[few] / alone - cut / few, cut


def _lives(job: Job, settings: Settings, layout: str, ranks: int, *, samples: int, length: int | None = None) -> _Seen:
    """The second of two microbatches, so that gradients are there and are added to."""
    plan = plan_of(settings, layout, ranks, samples=samples)
    scene = Scene(mesh=plan.mesh)
    heard: list[Lives] = []

    def see(*told: Any) -> None:
        if heard:
            heard[0].see(*told)

    with nullcontext() if ranks == 1 else nobody_there(ranks), preserved(), scene.baton:
        hollow = Hollow(emptied=scene.emptied, see=see)
        with hollow:
            hollow.holds = False
            built = build(job=job, settings=settings, plan=plan, world=scene.world(0, backend=plan.backend))
            hollow.holds = True
            batch = samples_of(job, settings, samples=samples).micro[0].data
            batch = batch if length is None else shortened(batch, length_of(job, settings), length)
            built.model.train()
            parts = built.step.parts
            parts.contract.learn(batch)
            parts.tape.begin()
            parts.reducer.begin()
            lives = Lives(blocks=blocks_of(built.model))
            for number in range(2):
                if number:
                    heard.append(lives)
                with lives.running() if number else nullcontext():
                    terms = forward(parts, parts.portion(batch), step=0, index=number, num_samples=samples)
                    loss = torch.stack([total for total, _ in terms.values()]).sum()
                    del terms
                    if number:
                        lives.turn()
                    backward(parts, loss, last=False)
                    heard.clear()
                    del loss
            built.close()
    return lives.lives
