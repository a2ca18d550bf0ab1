"""Starting the scheduler processes, and what the hooks do inside them."""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import typing
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import sglang_dualdecoder
from sglang.srt.sparse_kv import metrics, plugin, ranks, refusals, sizing
from sglang.srt.sparse_kv.arguments import config_of
from sglang.srt.sparse_kv.host_memory import HostMemoryError
from sglang.srt.sparse_kv.policy import OF_ONE_RANK

logger = logging.getLogger(__name__)

# SGLang's endpoint for run-time state takes numbers by name; ours begin with this.
POLICY_PREFIX = "sparse_kv."
GIB = 1 << 30


# ------------------------------------------------------------ in the launching process


def launch_schedulers(
    original: Callable, cls: type, server_args: Any, port_args: Any, run_scheduler_process_func: Callable
) -> Any:
    """AROUND ``Engine._launch_scheduler_processes``."""
    config = config_of(server_args)
    if config is None:
        return original(cls, server_args, port_args, run_scheduler_process_func)
    plugin.start(plugin.LAUNCHER)
    try:
        setattr(server_args, sizing.HOST_ATTRIBUTE, sizing.host_bytes(config, server_args.device == "cpu"))
    except ValueError as error:
        refusals.refuse(f"{str(error).rstrip('.')}.")
    # Not a queue: it would hold semaphores, and SGLang kills the process that Python cleans those up with.
    refused, writer = multiprocessing.Pipe(duplex=False)
    run = functools.partial(sglang_dualdecoder.run_scheduler_process, run_scheduler_process_func, writer)
    result, processes = original(cls, server_args, port_args, run)
    result.wait_for_ready = functools.partial(_wait_for_ready, result.wait_for_ready, refused)
    return result, processes


def _wait_for_ready(original: Callable, refused: Any) -> None:
    try:
        original()
    except RuntimeError:
        # SGLang knows only that the process ended.
        if not refused.poll():
            raise
        sentence = refused.recv()
    else:
        return
    refusals.refuse(sentence)


async def keep_memory(original: Callable, self: Any, obj: Any, request: Any = None) -> None:
    """AROUND ``release_memory_occupation`` and ``resume_memory_occupation`` of the process that takes requests."""
    if config_of(self.server_args) is not None:
        raise ValueError(
            "sglang-dualdecoder: memory that the GPU shares with the host cannot be released and resumed; "
            "end the server to free it."
        )
    await original(self, obj, request)


def sound_request(
    original: Callable, self: Any, obj: Any, input_text: str, input_ids: Sequence[int] | None, *others: Any
) -> Any:
    """AROUND ``TokenizerManager._create_tokenized_object``: what the scheduler takes on trust, of one prompt."""
    if config_of(self.server_args) is not None:
        if input_ids is not None:
            if not len(input_ids):
                raise ValueError("sglang-dualdecoder: the prompt has no tokens; send at least one.")
            input_ids = _known_ids(input_ids, self.model_config.vocab_size)
        for name in _single_values():
            if isinstance(getattr(obj, name, None), (list, dict)):
                raise ValueError(
                    f"sglang-dualdecoder: {name} is a list and the prompt is one; send one value, or a list of prompts."
                )
    return original(self, obj, input_text, input_ids, *others)


def _known_ids(ids: Sequence[int], size: int) -> array[int]:
    """The array that SGLang makes of ids, which of an array is a plain copy. A long list takes longer to look through
    than to turn into one, and the first token waits for both. Raises ValueError, one sentence.
    """
    try:
        made = array("q", ids)
    except OverflowError:
        bounds = min(ids), max(ids)
    else:
        numbers = np.asarray(made)
        bounds = int(numbers.min()), int(numbers.max())
    for bound in bounds:
        if not 0 <= bound < size:
            raise ValueError(
                f"sglang-dualdecoder: the prompt has token id {bound} and this model knows 0 to {size - 1}; "
                "send ids of the model's own tokenizer."
            )
    return made


@functools.cache
def _single_values() -> tuple[str, ...]:
    """Fields of which the scheduler takes one value for each prompt. HTTP requests may give a list, for many prompts;
    SGLang splits it for many, and hands it on as it is for one.
    """
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

    simple = {str, int, bool, type(None)}
    hints = typing.get_type_hints(TokenizedGenerateReqInput)
    return tuple(name for name, hint in hints.items() if {*(typing.get_args(hint) or (hint,))} <= simple)


# ------------------------------------------------------------ in a scheduler process


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn our ValueErrors and HostMemoryErrors, one sentence each, into the end of this process.

    SGLang answers any Exception here with a traceback and a signal to its parent; SystemExit passes through to
    ``run_scheduler_process``, which reports the sentence.
    """
    try:
        yield
    except (ValueError, HostMemoryError) as error:
        raise SystemExit(str(error).rstrip(".") + ".") from error


def no_draft_pool(*, draft_worker: Any, spec_algorithm: Any, server_args: Any) -> None:
    """REPLACE ``get_draft_kv_pool``."""


def host_budget(original: Callable, self: Any, pre_model_load_memory: int) -> int:
    """AROUND ``KVCacheConfigurator._profile_available_bytes``: bytes of the host pool of this rank."""
    from sglang.srt.sparse_kv.sizing import plan_for_configurator

    with _refusing():
        available = _free_for_kv(original, self, pre_model_load_memory)
        plan = plan_for_configurator(self, available, int(pre_model_load_memory * GIB))
    return plan.host_bytes


def _free_for_kv(original: Callable, configurator: Any, before_load: float) -> int:
    """SGLang's answer in bytes. Raises ValueError, one sentence, where weights leave nothing."""
    try:
        return original(configurator, before_load)
    except ValueError as error:
        from sglang.srt.runtime_context import get_schedule

        share = get_schedule().mem_fraction_static
        raise ValueError(
            f"the weights leave no GPU memory for a page cache: {before_load * GIB / 1e9:.1f} GB were free before they "
            f"were loaded, of which --mem-fraction-static {share} lets weights and cache have "
            f"{share * before_load * GIB / 1e9:.1f} GB; use a larger GPU, a higher --tp-size or a higher fraction"
        ) from error


def most_requests(original: Callable, self: Any, token_capacity: int) -> int:
    """AROUND ``KVCacheConfigurator.resolve_max_num_reqs``."""
    from sglang.srt.sparse_kv.sizing import current_plan

    return min(original(self, token_capacity), current_plan().max_running_requests)


def room_to_answer(original: Callable, self: Any) -> tuple:
    """AROUND ``TpModelWorker.get_worker_info``: lower ``max_req_input_len``, the sixth, below which prompts are taken.

    The scheduler admits what takes less than the pool with a page in reserve, prompts counted in whole pages.
    """
    info = list(original(self))
    tokens, page_size = info[0], self.model_runner.server_args.page_size
    info[5] = max(1, min(info[5], tokens - 2 * page_size + 1))
    return tuple(info)


def build_pool(configurator: Any, *, max_total_num_tokens: int, **_: Any) -> Any:
    """REPLACE the two builders of ``KVCacheConfigurator`` for plain attention."""
    from sglang.srt.sparse_kv.host_pool import build_host_pool
    from sglang.srt.sparse_kv.sizing import current_plan

    planned = current_plan().host_tokens
    with _refusing():
        if max_total_num_tokens != planned:
            raise ValueError(
                f"SGLang asks for a pool of {max_total_num_tokens} tokens and {planned} were planned; "
                "set --sparse-kv-host-memory instead of SGLang's own limits on tokens."
            )
        pool = build_host_pool(configurator, max_total_num_tokens)
    _Counters.runtime = pool.runtime
    return pool


def small_eager_buffers(original: Callable, self: Any, model_runner: Any) -> None:
    """AROUND ``EagerRunner.__init__``: a forward holds one chunk of prefill at most, not the whole pool."""
    tokens = model_runner.max_total_num_tokens
    model_runner.max_total_num_tokens = min(tokens, model_runner.server_args.max_prefill_buffer_tokens())
    try:
        original(self, model_runner)
    finally:
        model_runner.max_total_num_tokens = tokens


def new_weights(original: Callable, self: Any, recv_req: Any) -> Any:
    """AROUND ``SchedulerWeightUpdaterManager.update_weights_from_disk``."""
    if not recv_req.flush_cache or self.is_fully_idle():
        return original(self, recv_req)
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    return UpdateWeightFromDiskReqOutput(
        success=False,
        message="sglang-dualdecoder: the weights stay, since requests are paused whose pages cannot be flushed; "
        "send flush_cache false, or pause with mode abort.",
        num_paused_requests=0,
    )


class _Counters:
    """What there is one of in this process; SGLang's statistics have no way to the pool."""

    runtime: Any = None
    exporter: Any = None


def log_counters(parts: list[str], self: Any) -> list[str]:
    """AFTER ``PoolStats.get_decode_usage_msg_parts``: parts of a log line, joined by commas."""
    return [*parts, _Counters.runtime.log_suffix().strip(" ,")]


def publish_metrics(result: None, self: Any, stats: Any) -> None:
    """AFTER ``SchedulerMetricsCollector.log_stats``: there is a collector with --enable-metrics only."""
    from sglang.srt.sparse_kv.prometheus import Exporter

    if _Counters.exporter is None:
        _Counters.exporter = Exporter(self)
    _Counters.exporter.publish(_Counters.runtime, stats)


def report_state(result: Any, self: Any, recv_req: Any) -> None:
    """AFTER ``Scheduler.get_internal_state``: the first rank's counters, and in ``ranks`` the main ones of each."""
    summary = _runtime(self).summary()
    own = metrics.of_rank(summary) | {"free_tokens": self.token_to_kv_pool_allocator.available_size()}
    result.internal_state["sparse_kv"] = {**summary, "ranks": ranks.gather(own)}


def set_policy(original: Callable, self: Any, recv_req: Any) -> Any:
    """AROUND ``Scheduler.set_internal_state``: names that begin with ``sparse_kv.`` are ours, and come alone.

    ``sparse_kv.reset_counters`` starts the counters anew, ``sparse_kv.rank`` leaves the other ranks as they are, and
    the rest are fields of the policy.
    """
    update = {
        name.removeprefix(POLICY_PREFIX): value
        for name, value in recv_req.server_args.items()
        if name.startswith(POLICY_PREFIX)
    }
    if not update:
        return original(self, recv_req)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    refused = ""
    try:
        if len(update) < len(recv_req.server_args):
            raise ValueError("sparse_kv policy and SGLang's own state cannot be set by one request; send two.")
        if not self.is_fully_idle():
            raise ValueError("sparse_kv policy is switched between requests only; wait until none runs.")
        _switch(self, update)
    except ValueError as error:
        refused = str(error)
        logger.warning("Policy unchanged: %s", error)
    return SetInternalStateReqOutput(updated=not any(ranks.gather(refused)))


def _switch(scheduler: Any, update: dict[str, Any]) -> None:
    only = update.pop("rank", None)
    if only is not None:
        size = scheduler.ps.tp_size
        if only not in range(size):
            raise ValueError(f"sparse_kv.rank is one of the {size} ranks, counted from 0, got {only}")
        shared = sorted({*update} - {*OF_ONE_RANK, "reset_counters"})
        if shared:
            raise ValueError(
                f"sparse_kv policy {', '.join(shared)} must be the same on all ranks; leave out sparse_kv.rank"
            )
        if only != scheduler.ps.tp_rank:
            return
    reset = update.pop("reset_counters", 0)
    if update:
        _runtime(scheduler).apply_policy(update)
    if reset:
        _runtime(scheduler).reset_counters()


def _runtime(scheduler: Any) -> Any:
    return scheduler.token_to_kv_pool_allocator.get_kvcache().runtime
