"""Checks of a job and its options before the first step. A new incompatibility goes to `option_compatibility`.

Start with `check_job.py`.

- `check_job.py`: Checks of a job's model, optimizers and LR schedulers before the first step.
- `evaluation_checks.py`: Checks of the requested evaluations and of batch sizes, and notes about them for the banner.
- `example_batch.py`: The example batch: one microbatch that runs through the full model, to plan how to split the model
  over ranks.
- `loss_modules.py`: Checks for parts of a loss that are not in the model: modules and parameters that are not trained,
  sent or saved.
- `lr_schedule_units.py`: Detection of a learning rate schedule that ends too early: it counts epochs, but is stepped
  once per update.
- `option_compatibility.py`: Checks of combinations of job, settings and plan that are not supported.
- `parallel_checks.py`: Checks of a job for `cp` and `ep`: which dimension is the sequence, and that the split model
  gives equal results.
"""
