"""The machines (nodes) of a run: how their processes meet, what each says of itself, and the links between them.

Start with `examination.py`.

- `examination.py`: The examination of machines before a training: all nodes meet, and node 0 says what is wrong.
- `fact_findings.py`: Judgement of the facts of machines: what each one lacks, and what differs between them.
- `finding.py`: Findings: what is wrong with a machine or a link, and what to do.
- `head_connection.py`: The way of a node to the head of a run: it connects, introduces itself, and waits for a place.
- `launcher_options.py`: Map the options of other launchers and of Slurm to one line of Paceline's: how many nodes there
  are, and where.
- `line_channel.py`: A connection between two nodes that carries JSON values, one in each line.
- `link_findings.py`: Judgement of the links between nodes: one finding for a node that no other one reaches, else one
  for each pair.
- `link_measurement.py`: The measurement of a link between two nodes: a connection to a port that the kernel chose,
  pings, and a stream.
- `machine_facts.py`: The facts of a machine before a training, by which the machines of a run are compared.
- `network_interfaces.py`: The network interfaces of this machine, asked from the kernel.
- `node_link.py`: A link to another node while a run lasts: its messages, how long nothing has come from it, and what
  that means.
- `node_meeting.py`: The meeting of nodes: the head listens, the others connect, and each gets a number.
- `node_place.py`: The place of this process among the nodes: how many there are, which one this is, and where they
  meet.
- `rank_hints.py`: The advice of errors on several nodes, where they would say what to type on one machine.
- `run_folder_check.py`: The check that the run folder can be written, and that all nodes see the same one.
- `slurm_hosts.py`: The hosts of a Slurm step, from Slurm's own short form, such as `node[1-3,07],login`, and the port
  where they meet.
"""
