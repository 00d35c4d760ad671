"""Exports the complete model weights as safetensors, for Transformers, PEFT and inference engines.

An export is complete or does not exist.

FOLDER/hpcinit_export.json       the files of the export and their sizes, written last
       model.safetensors         or several files with an index, and config.json: a model of Transformers
       adapter_model.safetensors and adapter_config.json: the adapters of a PEFT model, without its base model

Rank 0 writes into the folder .FOLDER.RANDOM.tmp next to FOLDER. When every file is on the disk, rank 0 renames it.
"""

from __future__ import annotations

import glob
import json
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcinit.base.errors import CheckpointError, RequestError
from hpcinit.base.versions import installed
from hpcinit.train.checkpoint import checkpoint_folder, native_checkpoint
from hpcinit.train.checkpoint import owner as owners
from hpcinit.train.wrap.wrapped import Wrapped

MARKER = "hpcinit_export.json"
WEIGHTS = "model.safetensors"


class Saves(Protocol):
    """The interface of a tokenizer or processor from Transformers."""

    def save_pretrained(self, save_directory: str) -> object: ...


def export(
    wrapped: Wrapped, folder: Path, *, dtype: torch.dtype, tokenizer: Saves | None, timeout: timedelta, job: str
) -> Path:
    """Write the complete model weights into `folder` and return the folder, as Runtime.export describes.

    If an export fails, every rank raises an error, and an older export stays unchanged.

    job: the value of World.job.
    """
    if not isinstance(wrapped, Wrapped):
        raise RequestError(
            f"export() got a {type(wrapped).__name__}, expected the object that run.wrap() returned: wrapped = "
            "run.wrap(model); run.export(wrapped, folder)"
        )
    if not dtype.is_floating_point:
        raise RequestError(f"export() got dtype {dtype}, expected a floating-point type such as torch.bfloat16")
    if not installed("safetensors"):
        raise RequestError("export() needs the package safetensors, which is not installed: pip install safetensors")
    wrapped.refuse_offloaded("export()")
    wrapped.check_export()
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 - Path.resolve() would follow a link to an older export
    temporary: Path | None = None
    with native_checkpoint.patient(timeout):
        try:
            temporary = native_checkpoint.on_rank_0(partial(begin, folder, job))
            weights = _collect(wrapped, dtype)
            native_checkpoint.on_rank_0(partial(_write, wrapped.model, weights, dtype, tokenizer, temporary, folder))
        except CheckpointError as error:
            raise CheckpointError(f"cannot export to {folder}: {error}{_free(folder)}", quoted=error.quoted) from error
        finally:
            if temporary is not None and dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
    return folder


def begin(folder: Path, job: str) -> Path:
    """Create and return a temporary folder for the export.

    In the background, remove the temporary folders of exports whose job has ended. Raise RequestError if `folder`
    exists but no export wrote it.
    """
    _refuse_foreign(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    owner = owners.of_this_process(job)
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.*.tmp"):
        checkpoint_folder.remove_later(partial(checkpoint_folder.remove_if_ended, path, owner))
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    temporary.mkdir()
    owners.write(temporary / checkpoint_folder.OWNER, owner)
    return temporary


def _free(folder: Path) -> str:
    try:
        return f"; {shutil.disk_usage(folder.parent).free / 1e9:.1f} GB are free on this disk"
    except OSError:
        return ""


def _refuse_foreign(folder: Path) -> None:
    """Raise RequestError if `folder` contains anything that an export did not write."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise RequestError(f"cannot export to {folder}: it is not a folder")
    try:
        ours = {MARKER, checkpoint_folder.OWNER, *json.loads((folder / MARKER).read_text())["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        ours = set()
    found = sorted(set(_files(folder)) - ours)
    if found:
        others = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise RequestError(
            f"cannot export to {folder}: it contains files that no export wrote ({', '.join(found[:3])}{others}). "
            "Export into a new folder, or move these files away"
        )


def _files(folder: Path) -> dict[str, int]:
    """Return the size of each file below `folder`, by its relative path."""
    found = (Path(inner, each) for inner, _, names in os.walk(folder) for each in names)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}


def _collect(wrapped: Wrapped, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the whole weights on rank 0, and {} on the other ranks. Tensors that the model shares stay shared.

    If rank 0 fails, it still takes part in the gathering, so that the other ranks do not hang.
    """
    model = wrapped.model
    # Call state_dict() first, because FSDP then puts its shards back into the modules. With keep_vars, the tensors are
    # the parameters themselves.
    named = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    wanted = _of_adapters(model, named) if _is_peft(model) else set(map(id, named.values()))
    first, copies, error = dist.get_rank() == 0, dict[int, Tensor](), None
    for original, whole in wrapped.whole_weights(wanted):
        if first and error is None:
            try:
                copies[id(original)] = _on_cpu(whole, dtype)
            except Exception as raised:
                error = raised
    native_checkpoint.gather_answers(None, error)
    return {name: copies[id(value)] for name, value in named.items() if id(value) in copies}


def _on_cpu(whole: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy on the CPU. Integers and 8-bit formats keep their type."""
    convert = whole.is_floating_point() and whole.element_size() > 1
    return torch.empty(whole.shape, dtype=dtype if convert else whole.dtype).copy_(whole.detach())


def _is_a(model: nn.Module, module: str, name: str) -> bool:
    """Return whether the model is an instance of the class MODULE.NAME, without importing the module."""
    there = sys.modules.get(module)
    return there is not None and isinstance(model, getattr(there, name))


def _is_peft(model: nn.Module) -> bool:
    return _is_a(model, "peft.peft_model", "PeftModel")


def _of_adapters(model: Any, named: Mapping[str, Tensor]) -> set[int]:
    """Return the id() of each tensor that PEFT saves. Its name is not enough, because PEFT may rename tensors."""
    from peft import get_peft_model_state_dict  # noqa: PLC0415 - the program has imported it

    found = {id(value) for value in named.values() if value.requires_grad}
    for adapter in model.peft_config:
        found |= set(map(id, get_peft_model_state_dict(model, state_dict=dict(named), adapter_name=adapter).values()))
    return found


def _write(
    model: Any, weights: dict[str, Tensor], dtype: torch.dtype, tokenizer: Saves | None, temporary: Path, folder: Path
) -> None:
    """Write and publish the export. Raise RequestError if another program has written to `folder` in the meantime."""
    if _is_peft(model) or _is_a(model, "transformers.modeling_utils", "PreTrainedModel"):
        model.save_pretrained(str(temporary), state_dict=weights)
        _name_dtype(temporary / "config.json", dtype)
    else:
        _save_plain(weights, temporary / WEIGHTS)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(temporary))
    versions = {name: found for name in ("torch", "transformers", "peft") if (found := installed(name))}
    files = {name: size for name, size in _files(temporary).items() if name != checkpoint_folder.OWNER}
    document = {"dtype": _name(dtype), "versions": versions, "files": files}
    (temporary / MARKER).write_text(json.dumps(document, indent=1) + "\n")
    for inner, _, names in os.walk(temporary):
        for each in [*names, "."]:
            checkpoint_folder.sync(Path(inner, each))
    _publish(temporary, folder)


def _save_plain(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a model that is not from Transformers. As in safetensors' save_model(), write each shared tensor once."""
    from safetensors.torch import save_file  # noqa: PLC0415 - not every program exports

    names: dict[int, str] = {}
    metadata = {"format": "pt"}
    for name, tensor in weights.items():
        if names.setdefault(id(tensor), name) != name:
            metadata[name] = names[id(tensor)]
    save_file({name: weights[name] for name in names.values()}, str(path), metadata)


def _name_dtype(path: Path, dtype: torch.dtype) -> None:
    """Set the dtype in Transformers' config.json to that of the export. Transformers 4 calls the key torch_dtype."""
    with suppress(FileNotFoundError):  # an export of adapters has no config.json
        document = json.loads(path.read_text())
        document |= {key: _name(dtype) for key in ("dtype", "torch_dtype") if key in document}
        path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _publish(temporary: Path, folder: Path) -> None:
    """Rename the written folder to its final name. It replaces an older export."""
    _refuse_foreign(folder)
    older = checkpoint_folder.set_aside(folder) if folder.exists() else None
    try:
        temporary.rename(folder)
    except OSError:
        if older is not None:
            older.rename(folder)
        raise
    (folder / checkpoint_folder.OWNER).unlink()  # last, because a temporary folder without this file is never removed
    checkpoint_folder.sync(folder.parent)
    if older is not None:
        checkpoint_folder.discard(older)
