"""The sizes, in bytes, of the buckets in which gradients are sent.

The runtime groups parameters by these sizes, and the planner counts the memory of the buckets. `FIRST_BUCKET_BYTES` and
`BUCKET_BYTES` are the defaults of `DistributedDataParallel`: a small first bucket, so that communication starts early,
and large ones after it. The other two sizes are Paceline's own.
"""

LARGE_PARAMETER_BYTES = 16 << 20
"""The gradient of a parameter above this size is sent alone, from the gradient's own memory, without a bucket."""

FIRST_BUCKET_BYTES = 1 << 20
"""The size of the bucket that is sent first."""

BUCKET_BYTES = 25 << 20
"""The size of the other buckets."""

TRANSIENT_BUCKET_BYTES = 10 << 20
"""The size of buckets on a CPU, if they are allocated and freed in every step."""
