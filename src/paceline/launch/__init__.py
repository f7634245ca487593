"""Starting ranks, or joining ranks that torchrun, mpirun or srun started."""
