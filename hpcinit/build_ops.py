"""`hpcinit build-ops`: compile DeepSpeed's ops once, where jobs find them."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcinit.base import console
from hpcinit.base.errors import RequestError
from hpcinit.base.versions import installed
from hpcinit.deepspeed import deepspeed_config, deepspeed_ops
from hpcinit.runtime import ops


def main(argv: Sequence[str]) -> int:
    given = console.parse_arguments(parser(), list(argv))
    if not installed("deepspeed"):
        raise RequestError("DeepSpeed is not installed in this environment: install hpcinit[deepspeed]")
    if not given.ops and not given.ds_config and not given.overrides:
        raise RequestError(
            "nothing to build: give the overrides to submit with (parallel=zero3_offload deepspeed.optimizer=adamw), "
            "--ds-config FILE, or --ops cpu_adam,..."
        )
    here = _device()
    device = given.device or here
    if device != here:  # DeepSpeed builds for what it sees, whatever we ask for
        raise RequestError(f"--device {device}, but this node has {here}: build on a node of the kind that trains")
    names = given.ops or ops.ops_needed(_config(given), device)
    if unknown := [name for name in names if name not in deepspeed_ops.BUILDERS]:
        raise RequestError(f"no op {unknown[0]!r}, expected one of: {', '.join(sorted(deepspeed_ops.BUILDERS))}")
    if not names:
        _say(given, [], "", f"nothing to build: this config compiles no op on {device}")
        return 0
    root = Path(given.into) if given.into else ops.shared_cache(os.environ)
    ops.build(names, root.absolute())
    _say(given, names, str(root), f"{', '.join(names)} in {root}")
    return 0


def _say(given: argparse.Namespace, names: Sequence[str], root: str, said: str) -> None:
    if given.json:
        print(json.dumps({"ops": list(names), "folder": root}))
    elif root or not given.quiet:
        print(root if given.quiet else said)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "hpcinit build-ops",
        description="Compile DeepSpeed's ops once, for this Python, torch, DeepSpeed and processor. "
        "Run it on the kind of node that trains: ops for a GPU need one.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for submit: what that run needs")
    parser.add_argument("--ops", type=lambda text: text.split(","), help="by name: cpu_adam,fused_adam,...")
    parser.add_argument("--ds-config", type=Path, help="a JSON file: what it needs")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    parser.add_argument("--into", help="another folder; jobs find it with TORCH_EXTENSIONS_DIR")
    return console.add_verbosity_options(parser)


def _device() -> str:
    import torch  # noqa: PLC0415 - not for --help

    return "cuda" if torch.cuda.is_available() else "cpu"


def _config(given: argparse.Namespace) -> dict[str, Any]:
    if given.ds_config:
        return _read(given.ds_config)
    from hpcinit.config import compose, job_spec  # noqa: PLC0415 - Hydra, which the other ways do without

    chosen = job_spec.training(compose.compose(given.overrides))
    if not chosen.wrapper.needs_deepspeed:
        return {}
    return deepspeed_config.without_ranks(deepspeed_config.options(chosen.deepspeed))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise RequestError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise RequestError(f"{path} holds {type(found).__name__}, expected a ds_config: an object of keys")
    return found
