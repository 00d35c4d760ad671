"""How long does `run.save` block training, with wait=True and with wait=False, on a slow file system?

    python -m benchmarks.saves [--gb 1] [--mb-per-s 50] [--tries 5] [--folder FOLDER]     (root)

Two ranks of one node with FSDP, each with `--gb` GB of the state. The checkpoints are on an ext4 file system in a file,
whose device the kernel throttles to `--mb-per-s` (cgroup v1, blkio.throttle.write_bps_device). A save starts when the
one before is complete. The time is that of the slower rank. The first save with wait=False is not counted: it starts
the writer processes and allocates the memory.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
LAYERS = 8


def rank(gb: float, tries: int, folder: Path) -> None:
    """Save with each way, and print a line of JSON on rank 0: way -> seconds of each save."""
    import torch  # noqa: PLC0415 - only the ranks need torch
    import torch.distributed as dist  # noqa: PLC0415

    import hpcinit  # noqa: PLC0415
    from hpcinit.records.layout import Layout  # noqa: PLC0415
    from hpcinit.records.spec import Training  # noqa: PLC0415
    from hpcinit.runtime.process_state import state  # noqa: PLC0415

    layout = Layout(dp_replicate=1, dp_shard=-1)
    with hpcinit.session(layout=layout, training=Training("fsdp")) as run:
        # A multiple of 64, as in most models: torch makes another copy of a shard if the ranks' shards differ in size.
        width = int((gb * 1e9 * run.world_size / 4 / LAYERS) ** 0.5) // 64 * 64
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        wrapped = run.wrap(model)
        taken: dict[str, list[float]] = {"wait=False": [], "wait=True": []}
        step = 0
        for way, seconds in taken.items():
            for _ in range(tries + (way == "wait=False")):
                step += 1
                dist.barrier()
                began = time.monotonic()
                saved = run.save(wrapped, folder, step, keep=1, wait=way == "wait=True")
                took = torch.tensor(time.monotonic() - began)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                seconds.append(took.item())
                while not saved.is_dir():
                    time.sleep(0.5)
                while state.background_saves is not None and not state.background_saves.poll():
                    time.sleep(0.5)
        if run.rank == 0:
            print(json.dumps({"wait=False": taken["wait=False"][1:], "wait=True": taken["wait=True"]}), flush=True)


@contextlib.contextmanager
def slow_folder(place: Path, gb: float, mb_per_s: float) -> Iterator[Path]:
    """Yield a folder on a new file system whose device takes `mb_per_s`."""
    image, folder = place / "disk", place / "slow"
    folder.mkdir()
    with image.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, int(gb * 1e9))
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    made = subprocess.run(["losetup", "--find", "--show", image], check=True, capture_output=True, text=True)
    device = made.stdout.strip()
    number = Path("/sys/block", Path(device).name, "dev").read_text().strip()
    try:
        subprocess.run(["mount", device, folder], check=True)
        THROTTLE.write_text(f"{number} {int(mb_per_s * 1e6)}")
        yield folder
    finally:
        THROTTLE.write_text(f"{number} 0")
        subprocess.run(["umount", folder], check=False)
        subprocess.run(["losetup", "--detach", device], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="GB of state per rank")
    parser.add_argument("--mb-per-s", type=float, default=50.0)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the file with the file system is made; default: TMPDIR")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        rank(asked.gb, asked.tries, asked.rank)
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        tempfile.TemporaryDirectory(dir=asked.folder) as place,
        slow_folder(Path(place), 6 * asked.gb + 0.5, asked.mb_per_s) as folder,
    ):
        where = {"HPCINIT_STARTED_BY": "env", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "benchmarks.saves", *sys.argv[1:], "--rank", str(folder / "checkpoints")]
        ranks = []
        for number in range(2):
            env = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
            pipe = subprocess.PIPE if number == 0 else None
            environment = {**os.environ, **where, **env}
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, text=True))
        output = ranks[0].communicate()[0]
        assert [each.wait() for each in ranks] == [0, 0]
    found = json.loads(output.splitlines()[-1])
    print(
        f"{datetime.date.today()}, {asked.gb:g} GB per rank, 2 ranks, {asked.mb_per_s:g} MB/s, {os.cpu_count()} cores"
    )
    for way, seconds in found.items():
        print(f"{way}: median {median(seconds):.2f} s of {', '.join(f'{each:.2f}' for each in seconds)}")


if __name__ == "__main__":
    main()
