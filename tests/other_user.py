"""Create an ordinary user of this machine, for tests of what Slurm shows to users."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.skip_or_fail import skip_or_fail


def python_for(as_user: Sequence[str]) -> str:
    """Return a Python of this version that a user can start; '' if there is none.

    as_user: the start of a command that runs the rest of it as that user.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for found in dict.fromkeys((f"{sys.base_prefix}/bin/python{version}", f"/usr/bin/python{version}")):
        # The shell has lost setpriv's right to read every file; setpriv itself has not.
        tried = [*as_user, "sh", "-c", f"exec '{found}' -c 'import venv'"]
        if subprocess.run(tried, capture_output=True, check=False, cwd="/").returncode == 0:
            return found
    return ""


@dataclass(frozen=True)
class User:
    """name: None for a uid without an entry in /etc/passwd. home: the user's folder, which all may read."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: Path
    name: str | None = None

    def command(self, *words: str) -> list[str]:
        """The command line that runs `words` as this user.

        The right to read every file stays: the interpreter and the checkout may be below /root.
        """
        groups = f"--groups={','.join(map(str, self.groups))}" if self.groups else "--clear-groups"
        kept = ("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search")
        return ["setpriv", f"--reuid={self.uid}", f"--regid={self.gid}", groups, *kept, "--", *words]

    def python(self) -> str:
        """Return a Python of this version that the user can start without more rights. Skip if there is none."""
        as_user = ["setpriv", f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups", "--"]
        return python_for(as_user) or skip_or_fail("no Python of this version that another user can start")

    def run(
        self, *words: str, env: Mapping[str, str] | None = None, timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        """Run `words` as this user in the user's home. HOME is set unless `env` has an empty one."""
        given = {"PATH": os.environ["PATH"], "HOME": str(self.home), "HPCINIT_CLUSTER": "local", **(env or {})}
        return subprocess.run(
            self.command(*words),
            env={key: value for key, value in given.items() if value},
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )


@contextmanager
def made(name: str, group: str) -> Iterator[User]:
    """Create a user in a new group `group`; remove both at the end. Needs root."""
    with _home() as home:
        subprocess.run(["groupadd", group], check=True)
        try:
            subprocess.run(["useradd", "--no-create-home", f"--home-dir={home}", f"--groups={group}", name], check=True)
            try:
                entry = pwd.getpwnam(name)
                os.chown(home, entry.pw_uid, entry.pw_gid)
                yield User(entry.pw_uid, entry.pw_gid, (grp.getgrnam(group).gr_gid,), home, name)
            finally:
                subprocess.run(["userdel", name], check=True, capture_output=True)
        finally:
            subprocess.run(["groupdel", group], check=True)


@contextmanager
def without_entry(uid: int = 51234) -> Iterator[User]:
    """Yield a user whose uid has no entry in /etc/passwd, as in many containers."""
    with _home() as home:
        os.chown(home, uid, uid)
        yield User(uid, uid, (), home)


@contextmanager
def _home() -> Iterator[Path]:
    """Create the folder outside pytest's folder, which only root may enter."""
    home = Path(tempfile.mkdtemp(prefix="hpcinit-user-"))
    home.chmod(0o755)
    try:
        yield home
    finally:
        shutil.rmtree(home)
