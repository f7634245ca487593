"""Setup of a training run: settings, data, model, optimizers and step.

Start with `build_training_setup.py`.

- `build_training_setup.py`: Build the training setup of a rank from a job: model, layout, optimizers and step.
- `duration.py`: The length of a run, the loop's saved progress, and the times of its steps.
- `initial_model.py`: The initial model of a run before placement: the full model, or only this rank's shards of a large
  model.
- `job_data.py`: The data of a job, as the sources and loaders that a run reads from.
- `optimizers.py`: The optimizer update of a run: optimizers for this rank's parameters, LR schedulers, loss scaler and
  EMA.
- `prepare.py`: Prepare a job before any process group exists: load it, merge its settings, make its plan, choose its
  run folder.
- `run_records.py`: The records of a run: the files of the run folder that say how this attempt was set up.
"""
