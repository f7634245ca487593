"""Iterable datasets, split into virtual shards so that any number of ranks reads the same samples.

Start with `iterable_loader.py`.

- `dataset_state_json.py`: Conversion of a dataset's own state to JSON and back.
- `epoch.py`: An epoch of a stream on one replica: which shards each batch is taken from, and the reading of the needed
  shards.
- `iterable_loader.py`: The training loader of iterable datasets (streams).
- `microbatch_collator.py`: Collation of a stream's samples into microbatches: in the rank, or, with data workers, in a
  separate process.
- `rank_mismatch.py`: Diagnosis of ranks that read different samples of a stream: a split by rank, a different order, or
  randomness.
- `shard_buffer.py`: A buffer of one shard on one replica: the samples that were read ahead, and the record for a
  resume.
- `shard_reader.py`: A reader of one virtual shard's samples, in order, from the shard's start or from a record of an
  earlier run.
- `shard_workers.py`: Reading of a replica's shards: in this process when they are needed, or ahead of time in data
  workers.
- `single_pass.py`: A single pass over a stream, for evaluation: each sample goes to exactly one replica.
- `virtual_sharding.py`: Virtual shards of a stream: whether and how the stream is split.
"""
