"""Simulate the events of a step, and forecast a long run with failures (goodput).

Start with `event_simulator.py`.

- `candidate_simulation.py`: Simulate one step of a candidate in virtual time.
- `checkpoint_interval.py`: Compute the optimal checkpoint interval: the exact one, the approximations of Young and
  Daly, and in whole steps.
- `event_simulator.py`: Simulate a planned step in virtual time, for any number of ranks, with collectives and slow
  ranks.
- `exposed_communication.py`: Compute how much each kind of communication adds to a simulated step.
- `failure_forecast.py`: Forecast the goodput of a planned run under failures, at a given checkpoint interval and at the
  best one.
- `goodput.py`: Compute the goodput of a long run with failures: the useful fraction of its time for a checkpoint
  interval.
- `overlap.py`: Add collectives to the times of a step.
"""
