"""Pipeline stages of any model, which is split along the graph that `torch.export` returns.

Start with `split.py`.

- `cut_points.py`: Choice of cut points along the exported graph, for models without a chain of blocks.
- `export.py`: Export of a memoryless model with `torch.export`, converted to a `Graph` of its modules' calls.
- `module_graph.py`: A model's forward as a list of steps: calls of its own modules, and operations between them.
- `module_mode_changes.py`: Detection of state that a forward sets on its modules between their calls, which an exported
  graph would lose.
- `split.py`: The split of a graph into stages; all values that are live at a boundary are sent, including skip
  connections.
- `stages.py`: Stages of a model without a chain of blocks: each runs its steps of the exported graph, with the model's
  modules.
"""
