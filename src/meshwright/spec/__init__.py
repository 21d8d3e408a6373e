"""Defines the specs: data types that the planner, the ranks and the reports exchange. A job has a model, a cluster and
a workload. A plan says how the job is distributed. An estimate has predicted values, a record has measured values. The
package has no I/O and does not import torch."""
