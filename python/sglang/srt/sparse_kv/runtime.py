"""One rank's sparse KV state: pool tensors, cache, schedule, policy and counters, made once when the pool is built."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sparse_kv import metrics
from sglang.srt.sparse_kv.config import SparseKVConfig
from sglang.srt.sparse_kv.gate import Gate
from sglang.srt.sparse_kv.geometry import Geometry, SelectionShape
from sglang.srt.sparse_kv.history import TokenHistory
from sglang.srt.sparse_kv.ops import landmarks
from sglang.srt.sparse_kv.ops.engine import engine_for
from sglang.srt.sparse_kv.ops.reference import NONE, LayerView
from sglang.srt.sparse_kv.page_cache import PageCache
from sglang.srt.sparse_kv.planner import Plan
from sglang.srt.sparse_kv.policy import Policy
from sglang.srt.sparse_kv.recorder import Recorder
from sglang.srt.sparse_kv.schedule import Schedule
from sglang.srt.sparse_kv.step import DecodeStep
from sglang.srt.sparse_kv.transfer import CPU_TRANSFERS, StreamTransfer, Transfer
from sglang.srt.sparse_kv.variants import Variant

FIRST_STEP = 1024  # the clock starts late enough that "long unused" is a positive stamp
LONG_UNUSED = 64  # steps after which prefill may take a slot from the decode working set
POISON = 3.0e4
# Policy that decides what is launched, so that captured graphs fix it.
CAPTURED = (
    "budget",
    "whole",
    "guide_attends",
    "residency",
    "shuffle_predictions",
    "skip_write_through",
    "skip_invalidation",
    "check",
    "poison",
)


class SparseKVRuntime:
    """Everything between SGLang's pool and the operations.

    host: [L, NP, H, 2, P, D] in host memory; device: where landmarks, tables and slots live.
    """

    def __init__(
        self, config: SparseKVConfig, geometry: Geometry, plan: Plan, host: torch.Tensor, device: torch.device
    ):
        self.config, self.geometry, self.plan, self.host = config, geometry, plan, host
        self.shape = plan.shape
        self.started = Variant.TWO_ROWS if config.most_rows == 2 else Variant.ONE_ROW  # which SGLang knows of
        self.variant = self.started  # of the step that runs
        if config.guide_attends == "own" and device.type == "cuda":
            raise ValueError('guide_attends "own" exists on the CPU engine only; use "selected" on a GPU')
        self.ops = engine_for(device)
        self.policy = Policy.from_config(config)
        units = geometry.num_layers, geometry.num_pages, geometry.kv_heads
        self.landmarks = landmarks.empty(*units, dim=geometry.head_dim, device=device)
        self.cache = PageCache(
            geometry,
            host,
            self.landmarks,
            plan.slots,
            config.residency,
            config.ring,
            both_modes=config.debug and device.type == "cpu",
        )
        self.device = device
        if device.type == "cuda":
            self._reserve_scratch()
        self.transfer = self._transfer("plain", config.seed)
        self.schedule = Schedule(self)
        # Row 0 is SGLang's padding row. Logical pages, best rank first.
        self.predicted = torch.full(
            (geometry.max_requests + 1, geometry.num_layers, geometry.kv_heads, self.shape.budget_pages),
            NONE,
            dtype=torch.int32,
            device=device,
        )
        slots, context = geometry.max_requests + 1, geometry.max_pages * geometry.page_size
        self.selected = torch.zeros(  # see ops/hysteresis.py
            (slots, geometry.num_layers, 2, geometry.kv_heads, geometry.selection_words),
            dtype=torch.int32,
            device=device,
        )
        self.gate = Gate(slots, device)
        self.history = TokenHistory(slots, context, device) if config.keeps_history else None
        clocks = [FIRST_STEP, FIRST_STEP - 1, FIRST_STEP - LONG_UNUSED, FIRST_STEP - LONG_UNUSED - 1]
        self._clocks = torch.tensor(clocks, dtype=torch.int32, device=device)
        # What a prefill brings of its prefix is older than what it writes itself, and makes room for it.
        self.clock, self.clock_before, self.clock_long_ago, self.clock_prefix = self._clocks.split(1)
        # On the device, so that a captured graph obeys a switch.
        self.prefetch_cap = torch.zeros(1, dtype=torch.int32, device=device)
        self.forced_cap = torch.zeros(1, dtype=torch.int32, device=device)
        self.hysteresis = torch.zeros(1, dtype=torch.float32, device=device)
        self._obey()
        self.recorder = Recorder(config.record, geometry.page_size, geometry.unit_bytes) if config.record else None
        self.guide_hits = torch.zeros(2, dtype=torch.int64, device=device)  # right guesses, guesses
        # Of each request slot since its prefill: units waited for, units fetched ahead.
        self.fetched = torch.zeros((geometry.max_requests + 1, 2), dtype=torch.int32, device=device)
        self.most_alone: int | None = None  # requests that CUDA graphs of ONE_ROW take; None where none are needed
        self.steps = dict.fromkeys(Variant, 0)
        self.tokens_stored = self.tokens_staged = 0  # whose K/V went to the host; came from there for prefill
        self.read = metrics.Reader(device)
        self._poisoned = torch.zeros(geometry.num_pages, dtype=torch.bool)

    # ------------------------------------------------------------ requests and guides

    def _reserve_scratch(self) -> None:
        """Scratch for the largest batch and chunk, before a graph is captured."""
        from sglang.srt.sparse_kv.ops.workspace import workspace

        geometry = self.geometry
        workspace(self.device).reserve(
            requests=geometry.max_requests,
            rows=self.config.most_rows,
            heads=geometry.kv_heads,
            group=geometry.group,
            max_pages=geometry.max_pages,
            width=self.shape.width,
            chunk_pages=self.plan.staging_tokens // geometry.page_size + geometry.max_requests,
        )

    @property
    def rows(self) -> int:
        """Rows a request in the step that runs."""
        return self.variant.rows

    @property
    def fetches_ahead(self) -> bool:
        """Whether the step that runs fetches for the next: not where one row was chosen because all pages fit."""
        return self.variant is Variant.TWO_ROWS or (self.variant is Variant.ONE_ROW and self.config.most_rows == 1)

    def tick(self) -> None:
        """Starts a step: what was selected until now may leave the cache."""
        self._clocks += 1

    def _obey(self) -> None:
        """Writes what the policy says to where kernels read it."""
        self.hysteresis.fill_(self.policy.hysteresis)
        cap = self.shape.prefetch_pages(self.policy.prefetch_cap)
        self.prefetch_cap.fill_(cap if self.policy.prefetch else -1)
        self.forced_cap.fill_(self.shape.forced_pages if self.policy.prefetch else -1)

    def reset_requests(self, req: torch.Tensor) -> None:
        """Forgets what request slots, int [N], predicted and selected: their owner may have changed."""
        # Not by assignment: torch would bring the number to the device, and wait until it is there.
        self.predicted.index_fill_(0, req.long(), NONE)
        self.selected.index_fill_(0, req.long(), 0)
        self.fetched.index_fill_(0, req.long(), 0)

    def note_guides(self, guess: torch.Tensor, tokens: torch.Tensor) -> None:
        """Counts right guesses. int [N] each: guesses, negative where there was none, and what was drawn."""
        self.ops.count_guides(self.guide_hits, guess, tokens)

    def note_prefill(self, prefix_lens: list[int], extend_lens: list[int]) -> None:
        """Counts what a prefill batch moves: each chunk's tokens to the host, the pages of its prefix from there."""
        page_size = self.geometry.page_size
        self.tokens_stored += sum(extend_lens)
        self.tokens_staged += sum(-(-prefix // page_size) * page_size for prefix in prefix_lens)

    def end_step(self, requests: int, record: dict[str, Any] | None = None) -> None:
        """Called by the worker after a decode forward of so many requests. record: what a recording keeps of the step,
        None for a look-ahead.
        """
        self.steps[self.variant] += 1
        self.tokens_stored += requests
        if self.recorder is not None:
            if record is None:
                self.recorder.drop()
            else:
                self.recorder.commit(record)
        if self.policy.check:
            self.cache.check()

    # ------------------------------------------------------------ debug

    def apply_policy(self, update: dict[str, Any]) -> None:
        """Switches policy while no forward runs. Raises ValueError, one sentence."""
        if not self.config.debug:
            raise ValueError(
                "sparse_kv policy is fixed in this server; start it with --sparse-kv-config '{\"debug\": true}'"
            )
        new = self.policy.changed(update, self.config, self.geometry.page_size)
        geometry, started = self.geometry, self.config
        shape = SelectionShape.from_tokens(
            geometry.page_size, new.budget, started.sinks, started.window, geometry.max_pages, new.whole
        )
        least = min(shape.width, geometry.max_pages)
        if new.cache_slots and not least <= new.cache_slots <= self.plan.slots:
            raise ValueError(
                f"sparse_kv policy cache_slots must be within {least} (one selection) and {self.plan.slots} "
                f"(allocated), got {new.cache_slots}"
            )
        switched = (new.rows, new.skip_scores) != (self.policy.rows, self.policy.skip_scores)
        if switched and self.config.rows != "auto" and self.device.type == "cuda":
            raise ValueError(
                "sparse_kv policy rows and skip_scores need CUDA graphs that only a server with rows auto has; "
                'restart it with --sparse-kv-config \'{"debug": true, "rows": "auto"}\''
            )
        captured = [name for name in CAPTURED if getattr(new, name) != getattr(self.policy, name)]
        if captured and self.device.type == "cuda":
            raise ValueError(f"sparse_kv policy {', '.join(captured)} is part of the CUDA graphs; restart to change it")
        self.transfer.join_all()
        if new.residency != self.policy.residency:
            self.cache.set_residency(new.residency)
        self._impose_misses(new.miss_rate)
        self.transfer = self._transfer(new.transfer, new.seed)
        self.cache.limit_slots(new.cache_slots)  # empties it, so that each policy starts from nothing
        self.predicted.fill_(NONE)
        self.policy, self.shape = new, shape
        self._obey()

    def _impose_misses(self, rate: float) -> None:
        if self.device.type == "cpu":
            if rate:
                raise ValueError(f"sparse_kv policy miss_rate exists on the CUDA engine only, got {rate}; use 0")
            return
        from sglang.srt.sparse_kv.ops.cuda import set_miss_rate

        set_miss_rate(self.device, rate)

    def _transfer(self, name: str, seed: int) -> Transfer:
        if self.device.type == "cpu":
            return CPU_TRANSFERS[name](seed)
        if name not in ("plain", "oracle"):
            raise ValueError(f"sparse_kv policy transfer {name} exists on the CPU engine only; use plain or oracle")
        from sglang.srt.sparse_kv.ops.cuda import skip_copies

        skip_copies(self.device, name == "oracle")
        return StreamTransfer(self.device)

    def reset_counters(self) -> None:
        self.cache.counters.zero_()
        self.cache.stalled.zero_()
        self.guide_hits.zero_()
        self.steps = dict.fromkeys(Variant, 0)
        self.tokens_stored = self.tokens_staged = 0

    def poison_freed(self, free_pages: torch.Tensor) -> None:
        """Overwrites what pages that came back to the allocator still hold, everywhere. free_pages int [M]."""
        free = torch.zeros_like(self._poisoned)
        free[free_pages.long().cpu()] = True
        fresh = (free & ~self._poisoned).nonzero()[:, 0]
        self._poisoned = free
        self.host[:, fresh] = POISON
        self.landmarks.scales[:, fresh] = POISON
        for buffer in self.cache.buffers():
            head, index = (buffer.slot_of[:, fresh] >= 0).nonzero(as_tuple=True)
            buffer.kv[head, buffer.slot_of[head, fresh[index]].long()] = POISON

    def check_selected(self, layer: int, view: LayerView, step: DecodeStep, pages, slots) -> None:
        """Raises AssertionError unless every selected slot still holds its page, byte for byte with the host."""
        heads = pages.shape[1]
        head = torch.arange(heads, device=pages.device)[None, :, None].expand_as(pages)
        used = pages >= 0
        assert bool((slots[used] >= 0).all()), f"layer {layer}: a selected page has no slot"
        owner = view.page_of[head[used], slots[used].long()]
        assert torch.equal(owner, pages[used]), f"layer {layer}: a selected slot changed owner within the step"
        if self.policy.skip_write_through or self.policy.transfer == "oracle":
            return
        tokens = torch.full_like(pages, self.geometry.page_size)
        is_open = pages == step.open_page[:, None, None]
        tokens = torch.where(is_open, step.last_tokens[:, None, None].to(tokens.dtype), tokens)[used]
        cached, truth = view.kv[head[used], slots[used].long()], view.host[pages[used].long(), head[used]]
        inside = torch.arange(self.geometry.page_size)[None, :] < tokens[:, None]  # [M, P]
        same = (cached == truth).all(-1).all(1)  # [M, P]
        assert bool((same | ~inside).all()), f"layer {layer}: a cached unit differs from the host"

    def flush(self) -> None:
        """Empties the cache and forgets every request: the allocator was cleared."""
        self.transfer.join_all()
        self.cache.flush()
        self.predicted.fill_(NONE)
        self.selected.zero_()

    # ------------------------------------------------------------ what really happened

    def summary(self) -> dict[str, Any]:
        return metrics.summary(self)

    def log_suffix(self) -> str:
        return metrics.log_suffix(self)
