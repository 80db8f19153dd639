"""A cluster in a box: hosts on this machine, each with its own link, disk, memory and mounts, and a shared file system.

Two cores cannot show how FanStore scales at full speed, but they can where links and disks are slow: what counts then
is where bytes are and who waits for them. Each part is in a module of its own:

- ``settings``: what the cluster and the job are; one TOML file, or a dataclass;
- ``box``: the namespaces in which everything lives, and vanishes with the process that started it;
- ``hosts``: bridge, links, disks, control groups, and how a command gets onto a host;
- ``job``: one training job in one of several ways to get at the data, and what was measured;
- ``meeting``: where the readers of all hosts meet, beside the network, and where epochs are measured;
- ``reader``: the program on each host that reads and computes; ``raw``: mpi4py alone with the same order;
- ``orders``: who reads what.

Used by cluster_job.py (one job) and by the records made of several jobs. Needs root.
"""
