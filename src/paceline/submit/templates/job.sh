#!/bin/bash
# Trains $job on $size. Hand it in with: sbatch $path
#SBATCH --job-name=$name
#SBATCH --nodes=$num_nodes --ntasks-per-node=1$gpu_option
# The whole node, so that processes and memory limits of other jobs do not disturb the ranks. Delete this to share it:
#SBATCH --exclusive --mem=0
#SBATCH --chdir=$folder
#SBATCH --time=$time_limit
# Three minutes before the time limit, all ranks save and stop. The job then ends with 75, and is started again below.
#SBATCH --signal=USR1@180
#SBATCH --requeue --open-mode=append
#SBATCH --output=$output$more_options
$environment
# --wait gives the other nodes time to save. --kill-on-bad-exit=1 would end them, and the exit code would not be 75.
srun --mpi=none --wait=60 --kill-on-bad-exit=0$container $command
code=$$?

if [ $$code = 75 ] && [ $${SLURM_RESTART_COUNT:-0} -lt $max_restarts ]; then
    scontrol requeue $requeued
    sleep 60 # the requeue ends this script
fi
exit $$code
