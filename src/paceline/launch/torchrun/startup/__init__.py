"""A folder that torchrun's workers have on their module path: Python runs its `sitecustomize` at the start.

Start with `sitecustomize.py`.

- `sitecustomize.py`: The start of a worker of torchrun: it asks the script server to run the script in a process that
  has torch imported.
"""
