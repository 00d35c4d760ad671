"""A fake: torch's CUDA build is told that NVML counts 8 GPUs. Only that is faked: starting CUDA fails without a driver.

Preload it before anything else (launch.preload), or import it first.
"""

import torch

GPUS = 8
current: list[int] = []  # what was made the current device in this process

torch.cuda._raw_device_count_nvml = lambda: GPUS
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
torch.accelerator.device_count = torch.cuda._device_count_nvml  # torch's own reading of CUDA_VISIBLE_DEVICES
torch.accelerator.set_device_index = current.append
