"""`python -m meshwright`: the command line, for where no script is on the path (another environment, a container). The same promise as cli/main."""

import sys

from meshwright.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
