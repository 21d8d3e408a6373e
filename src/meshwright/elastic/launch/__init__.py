"""Generates the files with which torchrun, Slurm and Kubernetes start a job on several machines, for `meshwright
launch`.

The launcher starts one process on each node. The environment variable MESHWRIGHT_NODE=1 says that this process is not a
rank but manages the ranks of its node. The node with RANK 0 leads: its supervisor starts and restarts the ranks of all
nodes, and handles changes of the number of nodes ([Note: generations] in elastic/supervisor.py).
"""
