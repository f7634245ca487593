"""The files that hand a training in to a scheduler, and what the scheduler would refuse of them.

Start with `submission.py`.

- `crd_checks.py`: Check of a document against a custom resource definition (CRD), as the API server checks it, but
  stricter.
- `follow_kubernetes.py`: Following a job of Kubernetes: its states and the log of node 0, until it ends.
- `follow_slurm.py`: Following a job of Slurm: its output, until it ends.
- `kubernetes_checks.py`: Checks of Kubernetes files without a cluster: what the API server, its webhooks and Kubeflow
  would refuse.
- `kubernetes_files.py`: The files for Kubernetes: a JobSet, a TrainJob of Kubeflow, or an indexed Job where neither is
  installed.
- `kubernetes_status.py`: The status of a training in Kubernetes: what the answers of `kubectl get` say of the job and
  of its pods.
- `pod_log.py`: The log of a pod, line by line.
- `ray_script.py`: The script for Ray: a driver that Ray starts in its cluster.
- `sagemaker_request.py`: The request for a SageMaker training job, and what the service would refuse of it.
- `scheduler_command.py`: A command of a scheduler, such as `sbatch` or `kubectl`, and what it prints.
- `slurm_option_hints.py`: Answer an option of sbatch after `paceline submit`: another option, `--using`, or the reason
  to leave it out.
- `slurm_script.py`: The batch script for Slurm.
- `submission.py`: A training to hand in to a scheduler, and the files that hand it in.
- `target_options.py`: The options that only one scheduler has: `--using partition=gpu account=me`.
"""
