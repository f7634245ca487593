"""Pipeline stages of any model: the split into stages, the values sent between stages, and the run of a stage.

Start with `pipeline_model.py`.

- `free_memory.py`: Release of the memory of parameters and buffers of other stages; names, shapes and dtypes don't
  change.
- `pipeline_model.py`: A model as pipeline stages: the stages that this rank runs, and their schedule.
- `stage_bounds.py`: Assignment of blocks to stages, from listed numbers of blocks or balanced by weights.
- `stage_io.py`: Conversion of the inputs and outputs of blocks to a list of tensors and a JSON description, and back.
- `stage_parameters.py`: Lookup of the stages that hold a parameter, for splits along a chain of blocks and along a
  graph.
- `stagewise_check.py`: Check of a stage split in one process: running all stages in order must give the result of the
  full model.
- `chain/`: Pipeline stages of a model that is a chain of blocks.
- `graph/`: Pipeline stages of any model, which is split along the graph that `torch.export` returns.
"""
