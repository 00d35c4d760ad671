"""Runs `hpcinit submit` as `python -m hpcinit.submit`."""

import sys

from hpcinit.cli.main import entry

if __name__ == "__main__":
    sys.exit(entry(["submit", *sys.argv[1:]]))
