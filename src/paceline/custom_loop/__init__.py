"""`pl.place`: a parallel model for the user's own training loop.

Start with `place.py`.

- `existing_world.py`: The world of a user's own script: torch's default group, a launcher's world, or this process
  alone.
- `gradient_guard.py`: Placeholders that hide gradients from the user's script.
- `parallel_model.py`: A model that `pl.place` has placed: its gradients, optimizers and saved files, for any training
  loop.
- `place.py`: `pl.place`: a model in a parallel layout, for training loops that are not a `Job`: GANs, RL, a custom
  trainer.
- `placed_model_files.py`: The files of `pl.place`: full tensors in plain safetensors, written one at a time and read
  back as shards.
"""
