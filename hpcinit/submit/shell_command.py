"""Implements `hpcinit shell RUN`: opens a shell on the node of a running rank. exec_command.py starts it."""

from __future__ import annotations

from hpcinit.submit.exec_command import shell_main as main
from hpcinit.submit.exec_command import shell_parser as parser

__all__ = ["main", "parser"]
