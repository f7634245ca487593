"""Process launch: starts ranks, or joins ranks that torchrun, mpirun or srun started."""
