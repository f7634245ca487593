"""A run over several nodes that Paceline starts itself: one agent on each node, and the head's agent decides.

The head's agent is `launcher.start`, as on one machine. So `RestartPolicy` decides on restarts here too.

Start with `node_group.py`.

- `attempt_part.py`: The part of an attempt that runs on one node: its request, which the fork server reads, and its
  environment.
- `attempt_progress.py`: The progress of the ranks of an attempt, from their heartbeats, and the result of the attempt
  on a node.
- `broken_links.py`: Links between nodes that no longer work: a rank that loses its connection does not know which link
  it was.
- `lost_nodes.py`: The files by which the head and the first parameter server tell each other about lost nodes.
- `member_agent.py`: The agent of a node that is not the head: it runs its part of each attempt, and watches the link to
  the head.
- `member_losses.py`: The members that a head loses during an attempt, and whether they show that the head itself is cut
  off.
- `node_counts.py`: The numbers of nodes with which a run may train, and what attempts have taught about them.
- `node_group.py`: The other nodes of a run as the head's agent sees them: it starts their parts of an attempt, and
  watches them.
- `node_history.py`: The history of a run's nodes: why each attempt on several nodes was followed by another one, in the
  order of time.
- `node_memory.py`: The checkpoints in the memory of one node: its agent owns their folder, and serves it to the other
  nodes.
- `node_messages.py`: The messages between the head's agent and the others while a run lasts.
- `node_stays.py`: `nodes.json` in the run folder: which nodes each attempt had, where they were, and why some left.
- `peer_checkpoint_search.py`: The checkpoints in the memory of all nodes as the head sees them: the newest one that is
  still complete.
- `position_report.py`: The reports of a member about its silent ranks, with which the head finds the rank that the
  others wait for.
- `stopped_wait.py`: A wait of a member between two attempts, such as for a lost head, that a stop signal ends in order.
- `worker_nodes.py`: The nodes that have only workers of parameter servers: the run goes on without one of them.
"""
