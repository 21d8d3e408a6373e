"""Runs the command line, for the script `meshwright` and for `python -m meshwright`."""

import sys


def main() -> int:
    """Runs the command line and returns its exit code. A Ctrl-C during the imports gives the same message and exit code
    as a later Ctrl-C."""
    try:
        from meshwright.cli.main import main as command
    except KeyboardInterrupt:
        sys.stderr.write("meshwright: interrupted; run the same command again to continue\n")
        return 75
    return command()


if __name__ == "__main__":
    sys.exit(main())
