"""A fake: NVML reports 8 GPUs to torch's CUDA build. Nothing else is faked: starting CUDA fails without a driver.

Preload it before anything else (launch.preload), or import it first.
"""

import torch

GPUS = 8
current: list[int] = []  # the devices that were made current in this process

torch.cuda._raw_device_count_nvml = lambda: GPUS
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
torch.accelerator.device_count = torch.cuda._device_count_nvml  # torch's parser of CUDA_VISIBLE_DEVICES
torch.accelerator.set_device_index = current.append
