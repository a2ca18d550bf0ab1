"""The speculative algorithm under which SGLang's scheduler, allocator and graph runner handle two rows a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs

NAME = "DUALDECODER"


class DualDecoderAlgorithm(CustomSpecAlgo):
    """Fills in what upstream asks of every algorithm but does not give to a registered one."""

    def need_topk(self) -> bool:
        """Whether the relay between steps carries draft probabilities: guides stay on the device instead."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        """Whether drafting writes KV: row 1's is stored nowhere, so no room is reserved for it."""
        return False

    if not hasattr(CustomSpecAlgo, "create_future_map"):

        def create_future_map(
            self,
            device: torch.device,
            req_to_token_pool: ReqToTokenPool,
            needs_cpu_seq_lens: bool = True,
            needs_confidence_relay: bool = False,
        ) -> FutureMap:
            """The relay that carries sampled tokens from one step to the next; the scheduler always builds one."""
            from sglang.srt.managers.overlap_utils import FutureMap

            return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)


def _check_started_by_us(server_args: ServerArgs) -> None:
    if getattr(server_args, "_sparse_kv", None) is None:
        raise ValueError(
            f"--speculative-algorithm {NAME} works only inside sparse KV; start with --sparse-kv dualdecoder instead."
        )


def register() -> None:
    """Make the algorithm known to SGLang in this process; calling it again does nothing."""
    if get_spec(NAME) is not None:
        return

    @SpeculativeAlgorithm.register(
        NAME,
        supports_overlap=True,
        validate_server_args=_check_started_by_us,
        spec_class=DualDecoderAlgorithm,
    )
    def create_worker_class(server_args: ServerArgs) -> type:
        # The worker pulls in models and kernels, which processes without a GPU need not load.
        from sglang.srt.sparse_kv.worker import DualDecodeWorker

        return DualDecodeWorker
