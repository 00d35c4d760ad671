"""`python -m hpcinit.submit`, the same as `hpcinit submit`."""

import sys

from hpcinit.cli.main import entry

if __name__ == "__main__":
    sys.exit(entry(["submit", *sys.argv[1:]]))
