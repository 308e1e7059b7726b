"""The processes that run one program together: a single one, or as many as accelerate or torchrun started."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list


def processes() -> PartialState:
    """Which process this is, of how many, and on what device.

    Without a GPU accelerate must be told so: it would else take each process for the only one.
    """
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    return PartialState(cpu=on_cpu or not torch.cuda.is_available())


def agree(tensors: Iterable[torch.Tensor]) -> None:
    """Give all processes what the first one has, after something that each has worked out on its own."""
    if processes().num_processes > 1:
        for tensor in tensors:
            torch.distributed.broadcast(tensor, 0)


def from_main(find: Callable[[], Any]) -> Any:
    """What the main process finds, so that all processes of a launch take the same way."""
    state = processes()
    state.wait_for_everyone()
    if state.num_processes == 1:
        return find()
    return broadcast_object_list([find() if state.is_main_process else None])[0]
