"""The recorder inside the processes of a foreign script: fingerprints of each optimizer step, by hooks of torch.

Start with `script_recorder.py`.

- `batch_exchange.py`: Write the batches of the script, or give it those of another recording.
- `batch_files.py`: The batches of a recorded run: a file for each batch of a data loader, and for each batch that a
  model got.
- `compute_precision.py`: The coarsest type in which a model computes: that of its weights, or of autocast, also where
  it begins inside.
- `fed_batches.py`: Batches of another recording in place of the script's own: one process trains on what several ranks
  trained on.
- `forward_watch.py`: The forward passes of the outermost module of a foreign script.
- `live_modules.py`: The modules of a foreign script: the script never says which model an optimizer trains, so they are
  looked up.
- `loader_passes.py`: The passes of the script's data loaders through their data: how many batches each gives, and for
  which epoch.
- `loader_watch.py`: The batches of the script's data loaders: each is seen, and may be replaced, before the script gets
  it.
- `model_pieces.py`: Pieces of a model: the elements of this process's parameters that each rank of another recording
  holds.
- `own_gradients.py`: The gradients that a rank computes itself, before any reduction: hooks on the parameters see them
  in the backward.
- `parameter_views.py`: The parameters of a model as an optimizer has them: whole, a part of a flat tensor, or a copy in
  float32.
- `sample_keys.py`: Keys of samples: a 64-bit number for each sample of a batch, equal for equal inputs on any rank and
  in any order.
- `script_recorder.py`: The recorder inside a foreign training process: it writes a line for each step of each
  optimizer.
- `source_lines.py`: The line of the user's own code that led to a hook.
- `tensor_print.py`: Summaries of tensors on their own device: random projections, norm and digest, without a copy of
  the tensor.
"""
