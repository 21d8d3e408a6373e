"""Defines the specs. A job (model, cluster, workload) is the question and a plan is the answer. An estimate has
predicted values, a record has measured values. The package has no I/O and does not import torch."""
