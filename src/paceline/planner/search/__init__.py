"""Search for the fastest layout that fits: search space, bounds, branch and bound.

Start with `branch_and_bound.py`.

- `bounds.py`: Compute provable lower bounds on the seconds and bytes of every candidate below a node of the search
  tree.
- `branch_and_bound.py`: Find the fastest layouts by branch and bound (Land and Doig, 1960): exact for the cost model.
- `evaluate_named_layout.py`: Estimate single layouts: those that a user names, and the rows of a plan.json.
- `fallbacks.py`: Find the fallback layouts of a run, which replace its layout if the run is out of memory.
- `layout_simplicity.py`: Order layouts by simplicity, and find the simplest layout that ties with the fastest.
- `layout_with_forecast.py`: Define a layout with its settings and its forecast, as a plan passes it to a run.
- `least_memory.py`: Find the candidate of a family that needs the least memory, to show by how much the family does not
  fit.
- `neighbors.py`: Find changes of one or two options that make a candidate fit into memory, each with its cost in time.
- `search_space.py`: Generate the search space: all candidates for a model on a number of ranks, as a tree that a search
  can prune.
- `shortlist.py`: Choose the candidates of a plan to time on the target cluster, and put the measured seconds into their
  estimates.
"""
