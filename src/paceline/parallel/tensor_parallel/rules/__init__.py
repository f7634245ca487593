"""Sharding propagation rules of the torch functions.

Start with `matmul.py`.

- `elementwise.py`: Sharding rules of elementwise functions, reductions, norms and dropout.
- `indexing.py`: Sharding rules of slicing, chunking and indexing, and of tensor attributes such as shape.
- `loss.py`: Sharding rules of losses, softmax and argmax over a sharded vocabulary, without an all-gather of the
  logits.
- `matmul.py`: Sharding rules of matmuls, embedding and attention.
- `views.py`: Sharding rules of views, copies and concatenations, whose results are sharded in the same way as their
  inputs.
"""
