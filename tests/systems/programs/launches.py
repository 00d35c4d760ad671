"""Both programs in turn, because a rank's imports take longer than they: `launches.py FOLDER`."""

from __future__ import annotations

import sys

import colossal
import flamingo

if __name__ == "__main__":
    colossal.main(f"{sys.argv[1]}/colossal")
    flamingo.main(f"{sys.argv[1]}/flamingo")
