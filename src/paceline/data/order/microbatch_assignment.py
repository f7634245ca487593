"""Assignment of microbatches to replicas."""


def assign_microbatches(num_micro: int, *, replica: int, replicas: int) -> range:
    """Return the microbatches of one replica, round robin: j belongs to replica j % replicas.

    Round k consists of microbatches k * replicas and following, so that synchronised statistics over one round are
    those of one process with a `replicas` times larger microbatch.
    """
    return range(replica, num_micro, replicas)
