"""The files that hand a training in to a scheduler, and what the scheduler would refuse of them.

Start with `submission.py`.

- `crd_checks.py`: Check of a document against a custom resource definition (CRD), as the API server checks it, but
  stricter.
- `follow_job.py`: Following a job that was handed in: its output, until it ends.
- `kubernetes_checks.py`: Checks of Kubernetes files without a cluster: what the API server, its webhooks and Kubeflow
  would refuse.
- `kubernetes_files.py`: The files for Kubernetes: a JobSet, a TrainJob of Kubeflow, or an indexed Job where neither is
  installed.
- `ray_script.py`: The script for Ray: a driver that Ray starts in its cluster.
- `sagemaker_request.py`: The request for a SageMaker training job, and what the service would refuse of it.
- `slurm_script.py`: The batch script for Slurm.
- `submission.py`: A training to hand in to a scheduler, and the files that hand it in.
- `target_options.py`: The options that only one scheduler has: `--using partition=gpu account=me`.
"""
