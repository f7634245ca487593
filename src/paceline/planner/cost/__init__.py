"""Estimate the memory and the seconds of one step for a layout: the cost model.

Start with `estimate.py`.

- `activations.py`: Estimate the activation memory of one rank at those points of a step that may be its peak.
- `cost_model.py`: Define the cost model: it estimates a candidate's memory, step time and price on a cluster, by closed
  forms.
- `estimate.py`: Define the `Estimate` of a candidate: its forecast memory, step time and price in one value.
- `forecast_margins.py`: Compute the error margins of a forecast.
- `layer_cost.py`: Estimate the cost of one part of the model for one rank and microbatch: compute, messages and memory.
- `layout_candidate.py`: Define a candidate: a layout with its microbatch size.
- `memory.py`: Estimate the peak memory of one rank.
- `pipeline_formulas.py`: Compute the activations in flight and the makespan of a pipeline schedule by closed forms.
- `step_time.py`: Estimate the seconds of one optimizer step: the pipeline, exposed messages and the update.
"""
