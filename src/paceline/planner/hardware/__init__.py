"""Describe clusters, devices and links: from a catalogue, a file or benchmark results, with their efficiency.

Start with `cluster.py`.

- `assumed_rates.py`: List what a forecast assumes about the cluster: links, reserved memory and peak rates, each with
  its source.
- `benchmark_results.py`: Define the results of a machine benchmark (probe): the measured times of devices, links and
  disk.
- `catalog.py`: List well-known accelerators and links, with the dense (not sparse) rates of their makers' data sheets.
- `cluster.py`: Describe a cluster: its devices, the links between them and its size, each with the source of the
  numbers.
- `cluster_file.py`: Read the TOML file of a cluster, and report all its mistakes at once.
- `efficiency.py`: Define the efficiency constants of the forecast: the fractions of a data sheet's rates that training
  reaches.
- `given_link.py`: Read the link between machines that `--link` gives: a rate, a name of the catalogue, or what `doctor`
  measured.
- `local_cluster.py`: Describe this machine as a cluster to plan for: one device per rank, and the link between them,
  from a probe.
- `parse_cluster.py`: Parse the cluster to plan for: `here`, `8xH100-80G`, `4x8xH100-80G@ib-ndr`, or a TOML file.
- `timing_curve.py`: Interpolate measured times.
- `unit_parsing.py`: Parse quantities with units: `80 GiB`, `400 Gbit/s`, `2 us`, `989 TFLOP/s`, `98.32 USD/h`.
"""
