"""Real torch uses the settings of the safeguards."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.runtime.spawned import without_gloos_line

BEFORE = """
import os
from pathlib import Path
from hpcinit.records import safeguards
safeguards.apply(os.environ, Path(os.environ["RUN"]), "7.0.0")
"""


def python(code: str, tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `code` after the safeguards, with a separate home and TMPDIR."""
    home, run = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    run.mkdir()
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(tmp_path), "RUN": str(run), **env}
    words = [sys.executable, "-c", BEFORE + textwrap.dedent(code)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120, check=True)
    done.stdout = without_gloos_line(done.stdout)
    return done


def test_places_of_caches(tmp_path: Path) -> None:
    """Inductor and Triton use the node's disk. torch's extensions stay where a program without hpcinit has them."""
    done = python(
        """
        from torch.utils import cpp_extension
        from torch._inductor.runtime import cache_dir_utils
        print(cpp_extension.get_default_build_root())
        print(os.environ.get("TORCH_EXTENSIONS_DIR"))
        print(cache_dir_utils.cache_dir())
        print(cache_dir_utils.triton_cache_dir(0))
        """,
        tmp_path,
    )
    kernels = f"{tmp_path}/hpcinit-{os.geteuid()}/kernels-{os.uname().nodename}"
    extensions = f"{tmp_path}/home/.cache/torch_extensions"
    assert done.stdout.splitlines() == [extensions, "None", f"{kernels}/inductor", f"{kernels}/triton"]


def test_the_recorder_records_and_does_not_warn(tmp_path: Path) -> None:
    """torch reads the recorder's size from the variable: it contains a collective, and no name is deprecated."""
    code = """
        import torch, torch.distributed as dist
        from torch._C._distributed_c10d import _dump_fr_trace_json
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
        print(_dump_fr_trace_json().decode().count('"gloo:all_reduce"'))
        """
    done = python(code, tmp_path)
    assert done.stdout == "3\n" and "deprecated" not in done.stderr


def test_the_users_size_counts(tmp_path: Path) -> None:
    """A recorder that the user switched off stays off, which shows that the test above can fail."""
    (tmp_path / "off").mkdir()
    code = """
        import torch, torch.distributed as dist
        from torch._C._distributed_c10d import _dump_fr_trace_json
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        print(_dump_fr_trace_json().decode().count('"gloo:all_reduce"'))
        """
    assert python(code, tmp_path / "off", TORCH_NCCL_TRACE_BUFFER_SIZE="0").stdout == "0\n"


def test_dumps_are_in_the_run_folder(tmp_path: Path) -> None:
    """torch's writer of recorder files writes to the run folder, without a warning.

    Only NCCL's watchdog calls it, which needs GPUs; here it is called directly.
    """
    done = python(
        """
        import ctypes, torch
        class String(ctypes.Structure):  # libstdc++'s std::string
            _fields_ = [("text", ctypes.c_char_p), ("size", ctypes.c_size_t), ("short", ctypes.c_char * 16)]
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so"))
        writer, write = (library["_ZN4c10d15DebugInfoWriter" + rest] for rest in (
            "9getWriterEi", "5writeERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"))
        writer.restype, write.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.POINTER(String)]
        write(writer(3), ctypes.byref(String(b"trace", 5, b"")))
        """,
        tmp_path,
    )
    assert (tmp_path / "run/flight/7.0.0.rank_3").read_text() == "trace"
    assert "deprecated" not in done.stderr


def test_torchs_default_error_handling() -> None:
    """torch's default for failed collectives is still 3; if this fails, review the value that hpcinit sets."""
    code = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    folder = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    header = Path(folder, "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp").read_text()
    assert "the default value (3 - SkipCleanUp)" in header
