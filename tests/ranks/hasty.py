"""`meshwright` whose nodes count as gone after SILENCE seconds without a word, for tests that part them often."""

import sys

from meshwright.base import link
from meshwright.cli.main import main
from meshwright.elastic import node

SILENCE = 5.0

if __name__ == "__main__":
    node.SILENCE, link.UNANSWERED = SILENCE, int(1000 * SILENCE)
    sys.exit(main())
