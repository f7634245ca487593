"""Gradient norms, tied parameters, and combined reducers.

Start with `combined_reducer.py`.

- `combined_reducer.py`: A reducer composed of several, for parameters whose gradients are summed over different groups
  of ranks.
- `joint_grad_norm.py`: Compute the norm of a gradient that is sharded over several ranks.
- `partition.py`: Partition a model's parameters over the data-parallel ranks, and build the reducer of their gradients.
- `tied_parameters.py`: Sum the gradients of tied parameters over the pipeline stages that hold them, in floating point
  or as integers.
- `tied_uses.py`: Record a separate gradient for each use of a tied weight, so that exact mode adds the same terms in
  every layout.
"""
