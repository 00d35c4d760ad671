import sys

from hpcinit.cli import entry

sys.exit(entry())
