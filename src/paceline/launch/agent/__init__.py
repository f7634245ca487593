"""The supervisor that starts, watches and ends the ranks of one machine, and the main function of a rank.

Start with `supervisor.py`.

- `cleanup_process.py`: A cleanup process that kills the processes that a run leaves behind when its supervisor or fork
  server has ended.
- `forkserver.py`: The fork server: one fresh, single-threaded process that has torch imported.
- `forkserver_client.py`: The supervisor's connection to the fork server: it starts the server, requests attempts, and
  ends it.
- `launcher_death.py`: Parent-death signals: ranks die with a killed launcher, so that none continues to train in the
  run folder.
- `malloc_settings.py`: Settings of malloc that control whether the C library keeps freed memory.
- `parameter_server_processes.py`: Restart of lost workers: when servers hold the weights, a killed worker is restarted
  while the others continue.
- `process_exit.py`: Process exit: joins the job's threads, runs its exit functions and closes its files, as Python
  itself would.
- `rank_activity.py`: The activity of a rank: a thread in each rank writes it to a page, which other processes read.
- `resizing.py`: The number of ranks of a run that may continue with fewer: when it shrinks, and when it grows again.
- `restart_policy.py`: The decisions about a run: when an attempt starts, when a failed one is followed by another, and
  how the run ends.
- `shared_status.py`: The memory that a rank shares with its supervisor: heartbeats, the failure text, the exit code and
  a request to stop.
- `signals.py`: Signal handling in a worker: the first signal asks for a clean stop, and a second one may end the
  process.
- `socket_paths.py`: The choice of the folder for multiprocessing's sockets: the path of a socket has at most 107
  characters.
- `stop_requests.py`: The stop signals that the command receives, from its first attempt to its last.
- `supervisor.py`: The supervisor of one attempt on one node: it watches the workers, and reports which rank failed
  first.
- `worker_process.py`: The main function of a worker process: it runs the job's entry or script and exits with its exit
  code.
"""
