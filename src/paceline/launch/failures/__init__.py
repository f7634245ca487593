"""Failure diagnosis: finds which rank failed first, which rank hangs and where, and whether memory ran out.

Start with `first_failure.py`.

- `failure_record.py`: Failure records: the small file that a failing rank writes atomically before it exits.
- `first_failure.py`: Selection of the first failure from the failure records of all ranks.
- `hang_diagnosis.py`: Diagnosis of a hang: which rank the others wait for, why, and what to do about it.
- `hang_watch.py`: The supervisor's watch for hangs: within seconds, it names the rank for which the others wait.
- `missing_heartbeats.py`: The supervisor's watch for ranks that are alive but send no heartbeat.
- `oom_detection.py`: Out-of-memory detection: recognises the errors, and finds the phase of the step and the limit that
  was hit.
- `peer_machines.py`: The machines of the other ranks: with them, an error of gloo, which has the address of a peer,
  names its host.
- `rank_observer.py`: The observation of the ranks of one machine: how long each of them is silent, and stuck in one
  activity.
- `rank_position.py`: The position of a rank: its step, its process, its stack and its last exchange with other ranks.
- `single_reporter.py`: Choice of the rank that reports a failure under another launcher: the first failing rank on each
  machine.
- `stack_dumps.py`: Stack dumps of silent processes: each rank, and each data worker that it forks, writes its stack on
  request.
- `stuck_rank.py`: Hang detection: finds the rank that the others wait for, by its last heartbeat and its process state.
- `uncaught_exceptions.py`: Reports of uncaught exceptions in `pl.Run`, in `pl.place` and in functions such as
  `pl.train`.
"""
