"""`python -m bench`: every benchmark, about ten minutes on two cores. Tables and JSON are left in bench/results/."""

from __future__ import annotations

from bench import labels, peers, start

if __name__ == "__main__":
    for benchmark in (start, labels, peers):
        print(f"## {(benchmark.__doc__ or '').splitlines()[0]}\n", flush=True)
        benchmark.main([])
