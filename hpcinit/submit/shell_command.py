"""Implements `hpcinit shell RUN`: opens a shell on the node of a running rank, in the same way as exec_command.py."""

from __future__ import annotations

from hpcinit.submit.exec_command import shell_main as main
from hpcinit.submit.exec_command import shell_parser as parser

__all__ = ["main", "parser"]
