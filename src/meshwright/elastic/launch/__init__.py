"""What a launcher of several machines needs to start a job: files for torchrun, Slurm and Kubernetes.

On each node one process is started, the node's supervisor; which one leads is RANK 0, and MESHWRIGHT_NODE=1 says that
it is a node, not a
rank. Everything else, ranks, restarts, other numbers of nodes, is the supervisors' own ([Note: generations] in
elastic/supervisor.py).
"""
