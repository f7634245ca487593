"""Plan a training without a device: forecast memory and step time, search layouts and advise, from a model profile.

Start with `cost/estimate.py`.

- `advice/`: Write the text of a plan: recommendations, explanations, differences between plans.
- `cost/`: Estimate the memory and the seconds of one step for a layout: the cost model.
- `hardware/`: Describe clusters, devices and links: from a catalogue, a file or benchmark results, with their
  efficiency.
- `layout/`: Make execution plans from a layout and a cluster, and refuse combinations that cannot work.
- `model_costs/`: Describe the cost of a model's layers: profile, chain of layers, balance of stages, FLOPs.
- `search/`: Search for the fastest layout that fits: search space, bounds, branch and bound.
- `simulation/`: Simulate the events of a step, and forecast a long run with failures (goodput).
"""
