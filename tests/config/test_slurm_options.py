"""hpcinit's lists of the options of sbatch and srun agree with the real commands."""

from __future__ import annotations

import os
import re
import string
import subprocess

import pytest

from hpcinit.config import spellings
from tests.minislurm import MiniSlurm
from tests.skip_or_fail import skip_or_fail

VERSION = "22.05"


def getopt_message(slurm: MiniSlurm, command: str, name: str) -> str:
    """Return what getopt_long prints about --name. Empty input and an unknown last option prevent a job."""
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
    """Return every option whose first letter is ambiguous: getopt_long prints all possibilities."""
    texts = [getopt_message(slurm, command, letter) for letter in string.ascii_lowercase]
    return {name for text in texts for name in re.findall(r"'--([\w-]+)'", text.partition("possibilities:")[2])}


@pytest.mark.slurm
@pytest.mark.parametrize("command", ["sbatch", "srun"])
def test_the_list_is_that_of_slurm(idle_slurm: MiniSlurm, command: str) -> None:
    """The list contains exactly the options of Slurm 22.05."""
    if not idle_slurm.version().startswith(VERSION):
        skip_or_fail(f"the list is that of Slurm {VERSION}, and this is {idle_slurm.version()}")
    ours = spellings.KNOWN[command] - set(spellings.OF_PYXIS.split())
    alone = {name for name in ours if not any(other[0] == name[0] for other in ours - {name})}
    assert options(idle_slurm, command) == ours - alone
    assert not [
        name for name in alone if f"unrecognized option '--{name}'" in getopt_message(idle_slurm, command, name)
    ]


@pytest.mark.slurm
def test_abbreviations_mean_what_sbatch_takes_them_for(idle_slurm: MiniSlurm) -> None:
    """Every abbreviation that sbatch accepts for an option that hpcinit sets is recognized."""
    if not idle_slurm.version().startswith(VERSION):
        skip_or_fail(f"the list is that of Slurm {VERSION}, and this is {idle_slurm.version()}")
    pyxis = spellings.OF_PYXIS.split()  # not on this cluster: with it, sbatch calls conta ambiguous
    ours = spellings.KNOWN["sbatch"] - set(pyxis)
    for option in sorted(option for option in ours if spellings.instead(option, "sbatch")):
        for end in range(1, len(option)):
            name = option[:end]
            text = getopt_message(idle_slurm, "sbatch", name)
            if any(other.startswith(name) for other in pyxis):
                continue
            if f"'--{name}' is ambiguous" not in text and name not in spellings.KNOWN["sbatch"]:
                assert spellings.full_name(name, "sbatch") == spellings.SAME.get(option, option), (name, text)


def test_an_unknown_option() -> None:
    """An unknown name and an ambiguous abbreviation are returned unchanged: sbatch refuses them."""
    assert [spellings.full_name(name, "sbatch") for name in ("frobnicate", "clus", "time")] == [
        "frobnicate",
        "clus",
        "time",
    ]
