"""Diagnosis of ranks that read different samples of a stream: a split by rank, a different order, or randomness.

A run assigns the samples of a stream to ranks. A stream that already selects a part by rank is divided twice: each rank
uses only its own microbatches of its part, and the other samples are never used.
"""

from collections.abc import Sequence

from paceline.errors import DataError

NOT_SEEDED_CAUSE = "the iterable differs each time it is read"
SEED_HINT = "seed it, or let it depend only on set_epoch(epoch)"
SPLIT_TWICE_CAUSE = (
    "the stream selects a part by rank (get_rank(), RANK, islice(stream, rank, None, world_size), "
    "split_dataset_by_node, split_by_node), and the run divides this part again"
)
WHOLE_STREAM_HINT = (
    "give every rank the whole stream, as the run distributes the samples: for example islice(stream, 0, None, 1), "
    "split_dataset_by_node(stream, rank=0, world_size=1), nodesplitter=lambda urls: urls"
)
_OTHER_ORDER_CAUSE = "the same samples in a different order: an unsorted os.listdir, a set, or a shuffle seeded by rank"
_SORT_HINT = "sorted(os.listdir(...)), and a shuffle whose seed is the same on every rank"


def mismatch_error(
    first_reads: Sequence[Sequence[int]], second_reads: Sequence[Sequence[int]], ranks: tuple[int, int], *, where: str
) -> DataError:
    """Return the error for two `ranks` that read different samples. `where` names the stream in the message.

    `first_reads` and `second_reads` are the checksums of every rank's first samples, which each rank has read twice. If
    the two ranks have no sample in common, the stream probably selects a part by rank.
    """
    rank, other = ranks
    message = f"{where} gives different samples on rank {other} and rank {rank}"
    if any(list(first) != list(second) for first, second in zip(first_reads, second_reads, strict=True)):
        return DataError(
            f"{message}, and different ones when it is read again.", cause=NOT_SEEDED_CAUSE, hint=SEED_HINT
        )
    num_common = len(set(first_reads[rank]) & set(first_reads[other]))
    num_read = max(len(first_reads[rank]), len(first_reads[other]))
    if num_common:
        message = f"{message}: {num_common} of the first {num_read} are the same"
        return DataError(
            f"{message}, at different positions.",
            cause=_OTHER_ORDER_CAUSE,
            hint=f"{_SORT_HINT}; or: {WHOLE_STREAM_HINT}",
        )
    return DataError(
        f"{message}: none of the first {num_read} is the same.",
        cause=f"{SPLIT_TWICE_CAUSE}; or its files come in a different order (an unsorted os.listdir)",
        hint=WHOLE_STREAM_HINT,
    )
