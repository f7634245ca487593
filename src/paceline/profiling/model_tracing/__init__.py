"""Trace a step of training: its FLOPs, activations, memory over time, and communication.

Start with `fake_execution.py`.

- `activation_tracker.py`: Track the activation memory of each part of a model in a forward and backward: kept for
  backward, or transient.
- `block_timer.py`: Time the forward and backward of each block on one example batch, to balance pipeline stages.
- `communication_counter.py`: Count a rank's communication: calls and bytes of each collective and point-to-point
  message.
- `compile_fusion.py`: Estimate the memory traffic of a block's operations other than matmuls after a compiler has fused
  them.
- `fake_execution.py`: Fake execution: a model runs with true shapes and memory addresses, and without computing values.
- `fake_op_results.py`: Results of operations on tensors without values: plausible integers, and shapes that torch's
  inference gets wrong.
- `flop_counter.py`: Count the cost of each part of a forward: FLOPs of matmuls, bytes that other operations move, bytes
  saved.
- `memory_timeline.py`: Memory timelines: a rank's memory at every operation of a step, extrapolated from shallow models
  to a deep one.
- `memory_tracker.py`: Measure a rank's memory in a step: parameters, gradients, optimizer state, buffers, and all other
  tensors.
"""
