"""Files and folders: atomic writes, locks, full disks, temporary folders."""
