"""The platform class: what SGLang asks about the machine, answered for torch on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

# KV tokens come from the share of memory that SGLang calls static; its own default leaves too little for the rest
# of a machine whose only memory this is.
MEM_FRACTION_STATIC = 0.5


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Native torch operations, torch_native attention, no graphs, no overlap.

    SGLang calls a platform that it does not know OOT; calling ourselves CPU instead would make it expect the
    kernels of its AMX build.
    """

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        if server_args.device != "cpu":
            raise ValueError(
                f"--device is {server_args.device}, but the platform torch_cpu serves the CPU alone; "
                "hide the GPUs with an empty CUDA_VISIBLE_DEVICES, or unset SGLANG_PLATFORM."
            )
        # Upstream has filled in the backend of its AMX build by now; those kernels are not there.
        if server_args.attention_backend == "intel_amx":
            server_args.attention_backend = self.get_default_attention_backend()
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = MEM_FRACTION_STATIC
        # SGLang gives seeds to the sampler in its deterministic mode only, which asks for a backend on its lists.
        if server_args.enable_deterministic_inference:
            _allow_deterministic(self.get_default_attention_backend())
        # There is one stream on a CPU: overlap would only add bookkeeping.
        server_args.disable_overlap_schedule = True

    def get_device(self, device_id: int | None = 0) -> str:
        # SGLang's argument handling takes the result apart as text; upstream's mixin returns a torch.device.
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from sglang_cpu_platform.allocator import TorchPagedAllocator

        return TorchPagedAllocator

    def init_backend(self) -> None:
        from sglang_cpu_platform.without_triton import replace_triton_functions

        replace_triton_functions()

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self):
        import torch

        return torch.profiler.ProfilerActivity.CPU


def _allow_deterministic(backend: str) -> None:
    from sglang.srt import server_args

    if backend not in server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        server_args.add_deterministic_attention_backend_choices([backend])
        server_args.add_radix_supported_deterministic_attention_backend_choices([backend])
