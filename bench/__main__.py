"""`python -m bench`: every benchmark, about a quarter of an hour on two quiet cores; `python -m bench peers --ranks 2`
one of them, with its options.

Tables and JSON are left in bench/results/.
"""

from __future__ import annotations

import sys

from bench import (
    analysis,
    copies,
    labels,
    links,
    offload,
    own_loop,
    peers,
    pipeline,
    probe,
    recompute,
    recording,
    recovery,
    resize,
    search,
    simulate,
    start,
    tensor,
)

KNOWN = {
    "start": start,
    "analysis": analysis,
    "search": search,
    "simulate": simulate,
    "labels": labels,
    "links": links,
    "offload": offload,
    "own-loop": own_loop,
    "peers": peers,
    "pipeline": pipeline,
    "probe": probe,
    "recompute": recompute,
    "recording": recording,
    "recovery": recovery,
    "resize": resize,
    "copies": copies,
    "tensor": tensor,
}


def main(arguments: list[str]) -> None:
    if arguments and arguments[0] in KNOWN:
        KNOWN[arguments[0]].main(arguments[1:])
        return
    if arguments:
        sys.exit(f"bench: {arguments[0]!r} is not one of {', '.join(KNOWN)}")
    for benchmark in KNOWN.values():
        print(f"## {(benchmark.__doc__ or '').splitlines()[0]}\n", flush=True)
        benchmark.main([])


if __name__ == "__main__":
    main(sys.argv[1:])
