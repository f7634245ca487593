"""`report.html`: runs, plans, comparisons and verify results as pages.

Start with `run_report.py`.

- `curves.py`: The sections of a run's page with curves: metrics, time per step, and the norms of parameters and
  gradients.
- `failures.py`: The failures of a run: failed attempts, unreadable lines, and checkpoints that differ from their
  digests.
- `forecast_section.py`: The forecast of a run and the measurements of its first steps, for the run's page.
- `goodput_section.py`: The goodput of a run: which part of its time was spent on steps that count, and where the rest
  went.
- `layout_comparison.py`: A comparison of layouts of one job: a table for the screen, and a page with charts.
- `nodes_section.py`: The nodes of a run on several machines, for the run's page.
- `plan_report.py`: A plan as a page: for each layout, the memory compared with the device's, and the parts of a step.
- `run_comparison.py`: A comparison of runs: settings that differ, where the losses diverge, results and speed, as a
  table and as a page.
- `run_history.py`: The history of a run, from its folder: metrics by step, events, and the number of unreadable lines.
- `run_report.py`: `report.html`: one self-contained page about one run, made from its folder.
- `settings_table.py`: The settings of a run: the changed ones with their origins, then those at their default.
- `staleness_section.py`: The staleness of an asynchronous run's updates, for the run's page.
- `step_simulation_report.py`: Output about a simulated step: lines for the screen, the timeline as SVG, and a page with
  the parts of the time.
- `verify_section.py`: The section of a run's page about `verify`: a verdict on the same job, settings, layout and
  ranks.
- `sinks/`: Sinks for metrics and events while a run trains: JSON lines, console, TensorBoard.
- `svg/`: Charts as SVG text.
"""
