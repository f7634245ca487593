"""Checkpoint files on disk, without torch: manifest, two-phase commit, safetensors, resharding reads.

Start with `checkpoint_folder.py`.

- `checkpoint_folder.py`: Checkpoint folders: list, open, check, mark and remove them.
- `copy_checkpoint.py`: The copy of a checkpoint from memory to disk, in calls during which the other threads of the
  process run.
- `hf_folder.py`: Model folders for other programs: plain safetensors, split into several files with an index if large.
- `manifest.py`: The manifest of a checkpoint: it lists every file and tensor.
- `manifest_schema.py`: The schema of a manifest: the required type of every part.
- `memory_slots.py`: Slots: files in memory that a rank writes again and again, so that their memory is allocated only
  once.
- `remote_errors.py`: The errors of remote stores: what obstore and the servers say, in a few words, and what to do
  about it.
- `remote_folder.py`: The checkpoints of one run in a remote store, in the format of those on disk.
- `remote_store.py`: A remote store: files below a URL, such as s3://bucket/prefix.
- `resharding_reader.py`: Resharding reads: tensors are stored as shards in several files, and a rank reads the shards
  that it needs.
- `safetensors_io.py`: Tensors on disk in the safetensors format, each with its digest; nothing is pickled, and every
  size is checked.
- `superseded_checkpoints.py`: Superseded checkpoints: if a run resumes from an older checkpoint, newer ones are moved
  to a separate folder.
- `two_phase_commit.py`: Two-phase commit: a checkpoint is written to a staging folder, flushed and renamed; then
  `latest` names it.
- `peers/`: Checkpoints in the memory of several nodes: each node holds the files of its own ranks, and copies of a
  neighbour's.
"""
