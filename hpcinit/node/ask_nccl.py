"""Shows which network interface NCCL chooses on this node. sys.argv[1] is the path of the NCCL library.

This script runs in a child process. NCCL reads its settings once per process, so a rank must not load NCCL early. The
script needs no GPU and no driver.

With NCCL_DEBUG=INFO, NCCL prints its choice to stdout. The script prints the result to stderr as JSON.
"""

import ctypes
import json
import sys

UNIQUE_ID_BYTES = 128  # nccl.h: NCCL_UNIQUE_ID_BYTES


def main(path: str) -> int:
    try:
        nccl = ctypes.CDLL(path)
        get_id, last_error, get_version = nccl.ncclGetUniqueId, nccl.ncclGetLastError, nccl.ncclGetVersion
    except (OSError, AttributeError):
        return 3  # no NCCL, or a version before 2.13
    version = ctypes.c_int()
    get_version(ctypes.byref(version))
    status = get_id(ctypes.create_string_buffer(UNIQUE_ID_BYTES))
    last_error.restype = ctypes.c_char_p
    text = (last_error(None) or b"").decode(errors="replace")
    # Example: 23203 is 2.32.3.
    name = f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}"
    sys.stderr.write(json.dumps({"status": status, "error": text, "version": name}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
