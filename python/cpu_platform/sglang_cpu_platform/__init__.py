"""SGLang's platform for machines without a GPU, in plain torch operations.

Nothing here imports SGLang or torch until SGLang asks: the entry point runs in every process that resolves a
platform, also on machines where another one is used.
"""

from __future__ import annotations

import os

ENTRY_POINT = "torch_cpu"


def activate() -> str | None:
    """Name the platform class where this platform is the one to use, else None.

    It is where ``SGLANG_PLATFORM`` names it, or where no accelerator that SGLang supports by itself is found.
    """
    if os.environ.get("SGLANG_PLATFORM") == ENTRY_POINT or _no_accelerator():
        return "sglang_cpu_platform.platform.TorchCpuPlatform"
    return None


def _no_accelerator() -> bool:
    # An AMX build of SGLang's own CPU engine is chosen by this variable, and then needs no help.
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return False
    import torch

    others = ("xpu", "npu", "hpu", "musa")
    found = [name for name in others if hasattr(torch, name) and getattr(torch, name).is_available()]
    return not torch.cuda.is_available() and not torch.backends.mps.is_available() and not found
