"""`hpcinit shell RUN`: open a shell beside the ranks of a run, as exec_command.py runs a command there."""

from __future__ import annotations

from hpcinit.submit.exec_command import shell_main as main
from hpcinit.submit.exec_command import shell_parser as parser

__all__ = ["main", "parser"]
