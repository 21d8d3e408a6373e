"""Generates the files with which torchrun, Slurm and Kubernetes start a job on several machines.

Each node runs one process, the supervisor of the node. The node with RANK 0 leads. MESHWRIGHT_NODE=1 marks the process
as a node supervisor and not as a rank. The supervisors start and restart the ranks and handle changes of the number of
nodes ([Note: generations] in elastic/supervisor.py).
"""
