"""`hpcinit build-ops`: compiles DeepSpeed's ops once, into a folder that jobs use."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcinit.base import console, json_output
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
            "no ops to build: name them with --ops cpu_adam,..., or pass --ds-config FILE or the overrides of the "
            "run (parallel=zero3_offload deepspeed.optimizer=adamw)"
        )
    import torch  # noqa: PLC0415 - not for --help

    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = given.ops or deepspeed_ops.needed(_config(given), device)
    root = Path(given.into).absolute() if given.into else ops.shared_cache(os.environ)
    ops.build(names, root)
    folder = str(root) if names else ""
    text = f"built {', '.join(names)} in {root}" if names else f"nothing to build: this config needs no op on {device}"
    if given.json:
        print(json_output.line("build-ops", {"ops": list(names), "folder": folder}))
    elif folder or not given.quiet:
        print(folder if given.quiet else text)
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "hpcinit build-ops",
        description="Compile DeepSpeed's ops once, for this Python, torch, DeepSpeed and processor. "
        "Run it on a node of the type that the job uses: to compile ops for a GPU, the node needs a GPU.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="build the ops for a run with these keys")
    parser.add_argument("--ops", type=lambda text: text.split(","), help="build these ops: cpu_adam,fused_adam,...")
    parser.add_argument("--ds-config", type=Path, help="build the ops that this JSON file needs")
    parser.add_argument("--into", help="build into this folder; jobs use it if TORCH_EXTENSIONS_DIR is set to it")
    return console.add_verbosity_options(parser)


def _config(given: argparse.Namespace) -> dict[str, Any]:
    """Return the ds_config from the given file, or the one that hpcinit makes from the overrides.

    Return {} if the run that the overrides describe does not use DeepSpeed.
    """
    if given.ds_config:
        return _read(given.ds_config)
    from hpcinit.config import compose, job_spec  # noqa: PLC0415 - imports Hydra, which the other options do not need

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
        raise RequestError(f"{path} contains a {type(found).__name__}, expected a ds_config, which is a JSON object")
    return found
