"""The judge of a recorded run of a script: what is wrong, what is sound, and what was not exercised.

Start with `verdict.py`.

- `coverage.py`: Statements about what a recorded run did not exercise, so that a clean verdict says nothing about it.
- `data_findings.py`: Findings about the data: the same samples on several ranks, and batches of unequal size.
- `finding_causes.py`: Causes of findings that other parts of the recording show: unequal loss scales, a framework, an
  earlier fault.
- `forward_findings.py`: Findings about the forward passes: modules in eval mode, and random numbers that are equal on
  the ranks.
- `loader_findings.py`: Findings about data loaders: batches that come again, from other workers, in a second epoch, or
  after a new start.
- `model_split.py`: The way in which a script splits its model over ranks by itself, on plain tensors, as Megatron-LM
  does.
- `rank_peers.py`: Ranks that need the same batches, because they have parts of one model, or parts of its sequences.
- `reduction.py`: The reduction of gradients: those of a step are weighted sums of those that the ranks computed
  themselves.
- `reduction_findings.py`: Findings about the reduction of gradients: reduced at all, how, at which backward pass, and
  for which parameters.
- `script_finding.py`: A finding about a training script: what is wrong, since which step, where, and what to do.
- `script_run.py`: A recorded run of a script as the judge sees it: the steps that all ranks have, with the lines of all
  ranks.
- `setting_findings.py`: Findings about settings: different ones on different ranks, schedulers that step more often
  than the optimizer.
- `split_findings.py`: Findings about a model that is split over ranks by hand: replicas that part, equal shards,
  unequal clip factors.
- `verdict.py`: The verdict on a recorded run: the findings with the causes first, what is sound, and what was not
  exercised.
- `weight_findings.py`: Findings about weights and buffers: initialized, equal on all ranks, trained.
"""
