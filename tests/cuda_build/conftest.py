"""Ends the session where torch is not a CUDA build."""

from __future__ import annotations

import pytest
import torch


def pytest_configure() -> None:
    if not torch.version.cuda:
        raise pytest.UsageError(
            f"torch {torch.__version__} is a build for CPUs, expected one for CUDA: rm -r .venv/torch-*, and make "
            "test-cuda-build without TORCH_INDEX"
        )
