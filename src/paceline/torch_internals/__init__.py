"""Private torch APIs, and the dispatch modes and random streams that are built on them.

Code outside this package imports no private name of torch. It reads only a few private attributes, such as `torch._ops`
and the `_orig_mod` of a compiled module.

Start with `private_api.py`.

- `data_iterators.py`: The iterators of torch's `DataLoader`: each batch that one of them gives is seen.
- `dispatch_modes.py`: Dispatch modes that observe every operation of a thread; the only module that uses torch's
  dispatch modes.
- `flat_parameters.py`: The flat parameters of FSDP1, and which part of each original parameter a rank has.
- `flight_recorder.py`: The flight recorder of torch, which knows the collectives of a process that have not completed,
  whoever started them.
- `fsdp_units.py`: Private parts of `fully_shard`: keep units gathered until the caller frees them.
- `function_signatures.py`: The signatures of the torch functions that this library overrides, and the binding of call
  arguments to them.
- `private_api.py`: Code that uses private torch APIs, which are not documented.
- `pytree.py`: Traversal of tensors in nested data and outputs: mappings, sequences, named tuples and dataclasses, at
  any depth.
- `rng.py`: Random streams keyed by their purpose, so that no rank, worker or restart changes a draw.
- `scalars.py`: Conversion of numbers from Python, NumPy or one-element tensors.
"""
