"""Gradient compression for data-parallel replicas.

Start with `build_codec.py`.

- `build_codec.py`: Build the reducer that sums compressed gradients over the replicas, and the codec that it uses.
- `codecs.py`: Codecs, which pack the numbers of gradients into bytes.
- `error_feedback_reducer.py`: Reduce gradients with error feedback: the unsent part (the residual) is added to the next
  step's gradient.
- `powersgd.py`: Compress gradients to low rank by one step of a power iteration (Vogels et al., "PowerSGD", 2019).
- `quantized.py`: All-reduce a bucket of quantized gradients by an all-to-all of the chunks and an all-gather of their
  sums.
- `residual_memory.py`: Store tensors in two buffers, so that they change only when a step succeeds.
- `topk.py`: Top-k compression: the largest elements of a gradient are sent, the rest is the residual (Stich et al.,
  2018).
"""
