import sys

from hpcinit.cli.main import entry

sys.exit(entry())
