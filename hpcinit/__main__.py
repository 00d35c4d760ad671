import sys

from hpcinit.cli import main

sys.exit(main())
