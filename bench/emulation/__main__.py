"""`python -m bench.emulation CLUSTER -- COMMAND`: one command on every rank of an emulated cluster."""

import sys

from bench.emulation.command import main

sys.exit(main(sys.argv[1:]))
