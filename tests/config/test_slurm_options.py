"""Our list of sbatch's and srun's options, held against the real ones."""

from __future__ import annotations

import os
import re
import string
import subprocess

import pytest

from hpcinit.config import slurm_options
from hpcinit.config.slurm_options import OWNED, REASONS
from tests.leaving_out import leave_out
from tests.minislurm import MiniSlurm

VERSION = "22.05"


def said(slurm: MiniSlurm, command: str, name: str) -> str:
    """What getopt_long prints of --name; an empty standard input and a last option that does not exist start no job."""
    done = subprocess.run(
        [command, f"--{name}", "--no-such-option"],
        env={**os.environ, **slurm.env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stderr


def options(slurm: MiniSlurm, command: str) -> set[str]:
    """Every option whose first letter other options share: getopt_long prints them all as possibilities."""
    texts = [said(slurm, command, letter) for letter in string.ascii_lowercase]
    return {name for text in texts for name in re.findall(r"'--([\w-]+)'", text.partition("possibilities:")[2])}


@pytest.mark.slurm
@pytest.mark.parametrize("command", ["sbatch", "srun"])
def test_the_list_is_that_of_slurm(idle_slurm: MiniSlurm, command: str) -> None:
    """Slurm 22.05 has every option of the list, and no other."""
    if not idle_slurm.version().startswith(VERSION):
        leave_out(f"the list is that of Slurm {VERSION}, and this is {idle_slurm.version()}")
    ours = slurm_options.KNOWN[command] - set(slurm_options.OF_PYXIS.split())
    alone = {name for name in ours if not any(other[0] == name[0] for other in ours - {name})}
    assert options(idle_slurm, command) == ours - alone
    assert not [name for name in alone if f"unrecognized option '--{name}'" in said(idle_slurm, command, name)]


@pytest.mark.slurm
def test_beginnings_mean_what_sbatch_takes_them_for(idle_slurm: MiniSlurm) -> None:
    """Of each option that hpcinit keeps to itself, every beginning that sbatch accepts is recognized."""
    if not idle_slurm.version().startswith(VERSION):
        leave_out(f"the list is that of Slurm {VERSION}, and this is {idle_slurm.version()}")
    ours = slurm_options.KNOWN["sbatch"] - set(slurm_options.OF_PYXIS.split())
    for option in sorted((OWNED.keys() | REASONS.keys()) & ours):
        for end in range(1, len(option)):
            name = option[:end]
            text = said(idle_slurm, "sbatch", name)
            if f"'--{name}' is ambiguous" not in text and name not in slurm_options.KNOWN["sbatch"]:
                assert slurm_options.full_name(name, "sbatch") == slurm_options.SAME.get(option, option), (name, text)


def test_a_name_that_is_no_option() -> None:
    """An unknown name and an ambiguous beginning stay as they are: sbatch refuses them."""
    assert [slurm_options.full_name(name, "sbatch") for name in ("frobnicate", "clus", "time")] == [
        "frobnicate",
        "clus",
        "time",
    ]
