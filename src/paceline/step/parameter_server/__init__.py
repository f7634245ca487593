"""A parameter server: workers push gradients, servers hold weights.

Start with `parameter_server_step.py`.

- `flat_buffers.py`: Flat byte buffers for the weights and gradients sent between workers and servers.
- `lost_node_watch.py`: The first server's watch for lost nodes: it takes back what their workers were computing,
  without their timeout.
- `parameter_server_rule.py`: The rule of a parameter server: workers push gradients, servers hold the weights.
- `parameter_server_step.py`: The step of a parameter server (Li et al., OSDI 2014): workers compute gradients, the
  server updates the weights.
- `push_messages.py`: The gradients that workers push for the shares of a batch, and the totals of the batch.
- `served_tensors.py`: The model tensors that a server sends to its workers, and the digest that distinguishes models.
- `server_threads.py`: The threads of a server, one for each worker: they transfer weights and gradients, and record
  leases and pushes.
- `state.py`: The state that a server's main loop shares with its worker threads: one lock for leases, pushes and
  weights.
- `transport.py`: The connection between a worker and a server.
"""
