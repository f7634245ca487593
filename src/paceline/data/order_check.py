"""Checks of a user-defined order: it must be the same on every rank, and the same when an epoch is resumed."""

from collections.abc import Sequence

from paceline.errors import DesyncError, ResumeError

_ORDER_HINT = "order=lambda num_samples, epoch, seed: numpy.random.default_rng([seed, epoch]).permutation(num_samples)"
_SAMPLER_HINT = (
    "call torch.randperm(n) without generator= in the sampler's __iter__: the run seeds torch for each epoch"
)


def refuse_different_orders(checksums: Sequence[str], *, order_source: str, epoch_note: str) -> None:
    """Compare every rank's order; all ranks raise the same error.

    Raises:
        DesyncError: a rank's order differs from rank 0's.
    """
    different_ranks = [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]]
    if different_ranks:
        raise DesyncError(
            f"{order_source} gives a different order on rank {', '.join(map(str, different_ranks))} "
            f"than on rank 0{epoch_note}.",
            cause="it draws from an unseeded generator, or depends on the rank",
            hint=_hint(order_source),
        )


def refuse_changed_order(checksum: str, *, saved: str, order_source: str, epoch_note: str) -> None:
    """Compare the order of a resumed epoch with the order that the epoch was started with.

    Raises:
        ResumeError: the order is different.
    """
    if checksum != saved:
        raise ResumeError(
            f"{order_source} gives a different order than this run began with{epoch_note}.",
            cause="a generator that is unseeded or continues from epoch to epoch, or a changed order=",
            hint=f"{_hint(order_source)}; or --allow order: some samples repeat in this epoch, others are skipped",
        )


def _hint(order_source: str) -> str:
    return _ORDER_HINT if order_source.startswith("order=") else _SAMPLER_HINT
