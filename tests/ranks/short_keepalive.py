"""`meshwright` whose nodes count as gone after SILENCE seconds without a word, for tests that part them often."""

import sys

from meshwright.cli.main import main
from meshwright.core import secure_channel
from meshwright.elastic import node

SILENCE = 5.0

if __name__ == "__main__":
    node.NODE_TIMEOUT_SECONDS, secure_channel.ACK_TIMEOUT_MILLISECONDS = SILENCE, int(1000 * SILENCE)
    sys.exit(main())
