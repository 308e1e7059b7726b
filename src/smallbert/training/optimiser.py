"""One optimiser over parameter groups: the encoder's own, those without decay, and those with a rate of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smallbert.training.phase import Phase


def make_optimiser(phase: Phase) -> torch.optim.Optimizer:
    """AdamW, fused where the device has it, with tensor learning rates on a GPU so that graphs can be replayed."""
    settings, cuda = phase.settings, phase.device.type == "cuda"
    groups = _groups(phase, settings.lr, settings.weight_decay)
    for group in groups:
        group["base_lr"] = group["lr"]
        if cuda:
            group["lr"] = torch.tensor(float(group["lr"]), device=phase.device)
    extra: dict[str, Any] = {"capturable": True, "fused": True} if cuda else {"fused": True}
    return torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8, **extra)


def set_rates(phase: Phase, factor: float) -> None:
    """Multiply every group's own learning rate by the schedule's factor."""
    assert phase.optimiser is not None
    for group in phase.optimiser.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(group["base_lr"] * factor)
        else:
            group["lr"] = group["base_lr"] * factor


def trained_parameters(phase: Phase) -> list[nn.Parameter]:
    """Every parameter that this phase trains, each once."""
    both = [*phase.encoder.parameters(), *phase.modules.parameters()]
    return [parameter for parameter in dict.fromkeys(both) if parameter.requires_grad]


def _groups(phase: Phase, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    own: dict[nn.Parameter, float] = {}
    for module in phase.encoder.modules():
        rate = getattr(module, "own_rate", None)  # a part such as a mixture learns at its own rate in every phase
        if rate is not None:
            own.update(dict.fromkeys(module.parameters(), rate))
    for parameters, rate in phase.rates:
        own.update(dict.fromkeys(parameters, rate))
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in trained_parameters(phase):
        if parameter in own:
            key = (own[parameter], 0.0)
        else:  # biases, norms and single scalars are never decayed
            key = (lr, 0.0 if parameter.dim() < 2 else weight_decay)
        groups.setdefault(key, []).append(parameter)
    return [{"params": some, "lr": rate, "weight_decay": decay} for (rate, decay), some in groups.items()]
