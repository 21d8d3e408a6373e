"""What the script `meshwright` and `python -m meshwright` run: the command line, with the promise of cli/main from its
first import on."""

import sys


def main() -> int:
    """The exit code. A Ctrl-C while the command is still imported is said like any other one."""
    try:
        from meshwright.cli.main import main as command
    except KeyboardInterrupt:
        sys.stderr.write("meshwright: interrupted; the same command goes on\n")
        return 75
    return command()


if __name__ == "__main__":
    sys.exit(main())
