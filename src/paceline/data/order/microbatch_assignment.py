"""Assignment of microbatches to replicas."""


def assign_microbatches(num_micro: int, *, replica: int, replicas: int) -> range:
    """Return the microbatches of one replica, round robin: j belongs to replica j % replicas.

    Round k consists of the `replicas` microbatches from k * replicas on. Statistics that are synchronised over a round
    are therefore those of one process with a `replicas` times larger microbatch.
    """
    return range(replica, num_micro, replicas)
