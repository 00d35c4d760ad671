"""`python -m hpcinit.submit`, the same as `hpcinit submit`."""

import sys

from hpcinit.cli import main

if __name__ == "__main__":
    sys.exit(main(["submit", *sys.argv[1:]]))
