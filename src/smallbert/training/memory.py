"""How much memory is free, to say beforehand what would not fit."""

import torch


def free_memory(device: torch.device) -> int:
    """Bytes that could still be taken: on a GPU with those that torch holds but does not use."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    from psutil import virtual_memory  # comes with accelerate

    return int(virtual_memory().available)
