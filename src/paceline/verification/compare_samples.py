"""Compare samples from all over the dataset between the ranks; the compared steps read only a small part of it."""

import random
import time

from paceline.data.fetch import all_checksums, tell_epoch
from paceline.data.reader_process import read_apart
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.verification.rung_result import RungResult

_MOST, _SECONDS = 64, 1.0


def compare_samples(rung_result: RungResult, built: TrainingSetup) -> None:
    """Blame the data if a sample differs between ranks although each rank reads the same twice.

    Reads at most 64 samples, or as many as rank 0 reads in a second. Every rank calls this.
    """
    source, seed, world = built.data.train, built.settings.seed, built.world
    if world.world_size == 1 or not source.is_indexed:
        return

    def read(chosen: list[int] | None) -> tuple[list[int], list[int]]:
        data, begun, found = source.data, time.monotonic(), []
        tell_epoch(data, 0)
        total = len(data)
        spread = random.Random(seed).sample(range(total), min(total, _MOST))
        for index in spread if chosen is None else chosen:
            found.append(all_checksums(data, [index], epoch=0, seed=seed))
            if chosen is None and time.monotonic() - begun > _SECONDS:
                break
        return spread[: len(found)] if chosen is None else chosen, found

    first = read_apart(source, lambda: read(None), seed=seed) if world.is_main else None
    chosen = world.share_json(None if first is None else first[0])
    _, found = read_apart(source, lambda: read(chosen), seed=seed)
    everywhere = world.gather_json(found)
    is_same = all(world.gather_json(first is None or first[1] == found))
    for index, values in zip(chosen, zip(*everywhere, strict=True), strict=True):
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None and is_same:
            cause = (
                f"data: sample {index} differs between rank {other} and rank 0, in data that the compared steps did "
                "not read: a dataset that depends on the rank, or other files there"
            )
            rung_result.blame(step=1, parameter="(data)", cause=cause)
            return
