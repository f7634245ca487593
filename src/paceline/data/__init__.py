"""Loading data: each replica reads its own microbatches of every global batch.

Start with `loader.py`.

- `checksum.py`: Checksums of samples, computed over their content.
- `dataset_properties.py`: Properties of a dataset that are needed before training, and comparison of the ranks'
  datasets.
- `fetch.py`: The fetcher, which reads samples by index and collates them to a microbatch, in the rank or in a data
  worker.
- `fork_with_retry.py`: A fork that makes sure that the child runs.
- `leased_loader.py`: The loader of a parameter-server worker: reads any share of any batch on request.
- `loader.py`: The training loader, which yields a replica's microbatches of each global batch, and reading of
  evaluation data.
- `order_check.py`: Checks of a user-defined order: it must be the same on every rank, and the same when an epoch is
  resumed.
- `reader_process.py`: A separate process that uses the dataset in place of a rank, if the rank has data workers.
- `sample_seeds.py`: Per-sample seeds: each sample has its own seed, independent of the process that reads it.
- `source.py`: The user's data in one form: a map-style or iterable dataset, an order, and the settings for reading it.
- `types.py`: The types that a loader yields, and the settings that divide global batches.
- `worker_serialization.py`: Serialization of samples in the data worker itself.
- `workers.py`: Data workers: the processes of a torch DataLoader whose items are whole microbatches.
- `order/`: The data order: maps seed, epoch and position to the samples of each microbatch as a pure function.
- `stream/`: Iterable datasets, split into virtual shards so that any number of ranks reads the same samples.
"""
