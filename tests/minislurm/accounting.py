"""slurmdbd with a separate MariaDB; both run in the controller's namespaces and end with the cluster."""

from pathlib import Path

from tests.minislurm.daemons import entered, launch, listens, until, wait_started, with_log
from tests.minislurm.errors import MiniSlurmError
from tests.minislurm.network import Network
from tests.minislurm.shell import run

SQL = """
create database slurm_acct_db;
create user slurm@'127.0.0.1' identified by 'slurm';
grant all on slurm_acct_db.* to slurm@'127.0.0.1';
"""

# The database is small and not durable, because it is deleted with the cluster.
MARIADB = (
    "--no-defaults", "--user=root", "--bind-address=127.0.0.1", "--port=3306",
    "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M", "--innodb-flush-log-at-trx-commit=0",
    "--innodb-lock-wait-timeout=900",
)  # fmt: skip


def start(name: str, network: Network, directory: Path, controller: int) -> None:
    _start_mariadb(directory, controller)
    log = directory / "log/slurmdbd.log"
    wait_started(launch(controller, ["slurmdbd"], directory, log), "slurmdbd", log)
    until(
        lambda: listens(network.address("ctl"), 6819),
        lambda: with_log("slurmdbd does not listen on port 6819", log),
    )
    env = {"SLURM_CONF": f"{directory}/etc/slurm.conf"}
    try:
        run(["sacctmgr", "--immediate", "add", "cluster", name], env=env)
    except MiniSlurmError as error:
        raise MiniSlurmError(with_log(str(error), log)) from error


def _start_mariadb(directory: Path, controller: int) -> None:
    data, log = directory / "db", directory / "log/mariadb.log"
    run(
        ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", "--skip-test-db",
         "--auth-root-authentication-method=normal", "--innodb-log-file-size=16M"],
        timeout_s=300,
    )  # fmt: skip
    # mariadbd stays in the foreground. It is found by its mount, and no process waits for it.
    sock = directory / "run/mariadb.sock"
    files = [f"--datadir={data}", f"--socket={sock}", f"--log-error={log}", "--pid-file=mariadb.pid"]
    server = launch(controller, ["mariadbd", *MARIADB, *files], directory, log)

    def ready() -> bool:
        if server.poll() is not None:
            raise MiniSlurmError(with_log(f"mariadbd ended with exit status {server.returncode}", log))
        return sock.exists()

    until(ready, lambda: with_log("mariadbd made no socket", log), timeout_s=120)
    run(entered(controller, ["mariadb", "--no-defaults", f"--socket={sock}"]), stdin=SQL)
