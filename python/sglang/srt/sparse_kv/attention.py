"""SGLang's attention backend over the page cache: decode with one or two rows a request, streamed prefill."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph
from sglang.srt.sparse_kv.decode import decode_layer
from sglang.srt.sparse_kv.host_pool import HostPool
from sglang.srt.sparse_kv.prefill import Prefill
from sglang.srt.sparse_kv.step import DecodeStep


class SparseKVAttnBackend(AttentionBackend):
    """TARGET_VERIFY forwards are decode steps (the rows of each request adjacent), EXTEND forwards are
    prefill.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner):
        super().__init__()
        pool = model_runner.token_to_kv_pool
        if not isinstance(pool, HostPool):
            raise RuntimeError(
                f"--attention-backend dualdecoder needs the sparse KV host pool and found {type(pool).__name__}; "
                "start with --sparse-kv dualdecoder"
            )
        self.token_to_kv_pool = self.pool = pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.allocator = model_runner.token_to_kv_pool_allocator
        self.runtime = pool.runtime
        self.prefill = Prefill(self.runtime)
        self._begun = False  # a prefill whose forward is to come
        self._blank = False  # this prefill is nobody's: a CUDA graph is captured around its attention
        self.serves = False  # all graphs are captured
        self.step: DecodeStep | None = None

    # ------------------------------------------------------------ once a forward

    def init_forward_metadata(self, forward_batch) -> None:
        """An eager forward."""
        if self.runtime.policy.poison:
            self._poison_freed()
        mode = forward_batch.forward_mode
        if mode.is_target_verify():
            self.init_forward_metadata_in_graph(forward_batch)
        elif mode.is_extend():
            self._blank = not self._begun and is_in_breakable_cuda_graph()
            if self._blank and self.serves:
                raise RuntimeError("a prefill is replayed by a CUDA graph and the DUALDECODER worker has not begun it")
            if not self._begun and not self._blank:
                self.begin_prefill(
                    forward_batch.req_pool_indices,
                    list(forward_batch.extend_prefix_lens_cpu),
                    list(forward_batch.extend_seq_lens_cpu),
                    forward_batch.out_cache_loc,
                )
            self._begun = False
        elif not mode.is_idle():
            raise RuntimeError(f"forward mode {mode.name} is not part of sparse KV serving")

    def begin_prefill(
        self, req: torch.Tensor, prefix_lens: list[int], extend_lens: list[int], loc: torch.Tensor
    ) -> None:
        """As `Prefill.begin`. The worker calls it as soon as it has the batch: the prefix is on its way while SGLang
        makes a forward of it, in which nothing tells whose it is, since its tensors are copies.
        """
        self.prefill.begin(self.req_to_token_pool.req_to_token, req, prefix_lens, extend_lens, loc)
        self._begun = True

    def init_forward_metadata_in_graph(self, forward_batch) -> None:
        """A decode step's state and its first fetches; recorded into the CUDA graph, where lengths are the moment's."""
        if forward_batch.forward_mode.is_target_verify():
            self.step = DecodeStep.build(
                self.runtime.geometry,
                self.runtime.shape,
                self.runtime.variant,
                self.req_to_token_pool.req_to_token,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                self.runtime.ops,
            )
            self.runtime.schedule.begin_step(self.step)

    def _poison_freed(self) -> None:
        allocator = self.allocator
        free = [allocator.free_pages]
        if getattr(allocator, "release_pages", None) is not None:
            free.append(allocator.release_pages)
        self.runtime.poison_freed(torch.cat(free))

    # ------------------------------------------------------------ once a layer

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs):
        """q [T, Hq*D], k, v [T, H*D]; T = rows of decode requests, or a prefill batch's tokens. Returns [T, Hq*D]."""
        geometry = self.runtime.geometry
        tokens = q.shape[0]
        k = k.view(tokens, geometry.kv_heads, geometry.head_dim)
        v = v.view(tokens, geometry.kv_heads, geometry.head_dim)
        if forward_batch.forward_mode.is_target_verify():
            assert self.step is not None, "init_forward_metadata comes before the layers"
            out = decode_layer(self.runtime, self.step, layer.layer_id, q, k, v, layer.scaling)
        else:
            q = q.view(tokens, geometry.kv_heads * geometry.group, geometry.head_dim)
            out = self._extend(layer, q, k, v)
        return out.reshape(tokens, -1)

    def _extend(self, layer, q, k, v) -> torch.Tensor:
        """A prefill's attention, which runs between the segments of a CUDA graph where there is one for its tokens."""
        if self._blank:
            return torch.zeros_like(q)
        return self.prefill.forward(layer.layer_id, q, k, v, layer.scaling, borrowed=is_in_breakable_cuda_graph())

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs):
        raise RuntimeError(
            "plain decode reached the sparse KV backend: the DUALDECODER worker is not driving this model"
        )

    # ------------------------------------------------------------ CUDA graphs

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        pass

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return self.runtime.device.type == "cuda"
