"""Benchmarks: ours beside plain torch, DDP, FSDP2, DTensor tensor parallelism, torch's pipelining, and others where
they are installed.

`python -m bench` runs all; `python -m bench.peers`, `bench.labels`, `bench.start` one each. Tables go to
bench/results/. A figure is a median with
its quartiles over steps that were interleaved with those of the system it is compared with, in the same processes, on
the same batches.
"""
