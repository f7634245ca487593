"""Files and folders: atomic writes, locks, full disks, temporary folders.

Start with `atomic_files.py`.

- `atomic_files.py`: Atomic writes that survive a crash (temporary file, flush, rename), and safe reads of untrusted
  files.
- `disk_full.py`: The free space that a save needs, and explanations of disk errors: the cause of each, and a hint.
- `run_lock.py`: The lock of a run folder: one run at a time.
- `temporary_folders.py`: Temporary folders outside all runs.
"""
