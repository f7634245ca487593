"""A run over several nodes that Paceline starts itself: one agent on each node, and the head's agent decides.

- `node_group`: the members as the head's agent sees them: it starts attempts on them, and combines how they end.
- `member_agent`: the agent of a member, which runs its part of each attempt.
- `node_messages`: the messages between the two.
- `attempt_part`: the part of an attempt that runs on one node.

The head's agent is `launcher.start`, as on one machine. So `RestartPolicy` decides on restarts here too.

Start with `None`.

- `attempt_part.py`: The part of an attempt that runs on one node: its request, which the fork server reads, and its
  environment.
- `attempt_progress.py`: How far the ranks of an attempt got, from their heartbeats, and how the attempt ended on a
  node.
- `member_agent.py`: The agent of a node that is not the head: it runs its part of each attempt, and watches the link to
  the head.
- `node_group.py`: The other nodes of a run as the head's agent sees them: it starts their parts of an attempt, and
  watches them.
- `node_messages.py`: The messages between the head's agent and the others while a run lasts.
"""
