"""`hpcinit shell RUN`: opens a shell beside the ranks of a run, in the same way as exec_command.py runs a command."""

from __future__ import annotations

from hpcinit.submit.exec_command import shell_main as main
from hpcinit.submit.exec_command import shell_parser as parser

__all__ = ["main", "parser"]
