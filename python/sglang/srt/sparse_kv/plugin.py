"""The ledger: every place where this project changes SGLang, why, and what would break without it.

SGLang logs a failed plugin or hook and carries on. So nothing is hooked behind this ledger's back, and ``start``
checks every hook in the process that needs it: a server either runs with all of them or does not start.

Three groups, by the process that they are put in place in. ``ARGUMENTS``: every process that loads plugins; they
add flags and do nothing else. ``LAUNCHER``: the process in which somebody asked for sparse KV. ``SCHEDULER``: the
processes that it starts. Where nobody asks, SGLang runs its own code.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType
from sglang.srt.sparse_kv import refusals
from sglang.srt.sparse_kv.refusals import StartRefused

ARGUMENTS, LAUNCHER, SCHEDULER = "arguments", "launcher", "scheduler"
SOURCE = HookSource(plugin_name="dualdecoder", dist_name="sglang-dualdecoder")
_PACKAGE = "sglang.srt.sparse_kv"


@dataclasses.dataclass(frozen=True)
class Hook:
    """One hook on SGLang.

    Attributes:
        target: dotted name of what is hooked.
        kind: how.
        group: which processes need it.
        parameters: names of the target's parameters; with others it is not the function this was written for.
        owner: ``module:function`` of ours below this package, imported when the hook first runs.
        reason: why it is hooked.
        without: what breaks without it.
    """

    target: str
    kind: HookType
    group: str
    parameters: tuple[str, ...]
    owner: str
    reason: str
    without: str

    @functools.cached_property
    def function(self) -> Callable:
        """The function to register: finds the owner when it is first called, so that rooms load where they are used."""

        def hook(*args: Any, **kwargs: Any) -> Any:
            return _owner(self.owner)(*args, **kwargs)

        hook.__qualname__ = self.owner
        return hook


@functools.cache
def _owner(name: str) -> Callable:
    module, _, function = name.partition(":")
    return pkgutil.resolve_name(f"{_PACKAGE}.{module}:{function}")


_ARGS = "sglang.srt.server_args.ServerArgs"
_POOLS = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"

HOOKS = (
    Hook(
        f"{_ARGS}.add_cli_args",
        HookType.AFTER,
        ARGUMENTS,
        ("parser",),
        "arguments:add_flags",
        "adds the --sparse-kv flags",
        "the flags are unknown",
    ),
    Hook(
        f"{_ARGS}.from_cli_args",
        HookType.AROUND,
        ARGUMENTS,
        ("cls", "args"),
        "arguments:from_command_line",
        "hands the flags on to the constructor, which SGLang gives its own fields only",
        "the flags are parsed and forgotten: a dense server",
    ),
    Hook(
        f"{_ARGS}.__init__",
        HookType.AROUND,
        ARGUMENTS,
        (),  # the fields, several hundred; arguments.py finds them by name
        "arguments:initialise",
        "takes the keywords of sgl.Engine, refuses what is not served and sets what follows, before SGLang resolves",
        "sgl.Engine knows no sparse_kv, and SGLang chooses another backend, page size and algorithm",
    ),
    Hook(
        f"{_ARGS}._handle_model_specific_adjustments",
        HookType.BEFORE,
        LAUNCHER,
        ("self",),
        "arguments:check_model",
        "the first moment at which the model's configuration is known",
        "a model that is not served fails late, or answers wrongly",
    ),
    Hook(
        "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
        HookType.AROUND,
        LAUNCHER,
        ("cls", "server_args", "port_args", "run_scheduler_process_func"),
        "launch:launch_schedulers",
        "has the scheduler processes put their hooks in place first, and brings back the reason when one refuses",
        "SGLang's pool would be built, and a failed hook there would go unnoticed",
    ),
    *(
        Hook(
            f"{_CONTROL}.{what}_memory_occupation",
            HookType.AROUND,
            LAUNCHER,
            ("self", "obj", "request"),
            "launch:keep_memory",
            "refuses in one sentence, since without --enable-memory-saver nothing can be released",
            "SGLang says that it was done and does nothing, or ends the server when a request runs",
        )
        for what in ("release", "resume")
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        HookType.AROUND,
        LAUNCHER,
        ("self", "obj", "input_text", "input_ids", "input_embeds", "mm_inputs", "token_type_ids"),
        "launch:sound_request",
        "refuses prompts without tokens, token ids that the model does not know, and lists where a prompt has one "
        "value; SGLang checks none in a list of prompts",
        "one such request ends the server: an id is looked up in the embeddings, a list is compared with a number",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_builder.get_draft_kv_pool",
        HookType.REPLACE,
        SCHEDULER,
        ("draft_worker", "spec_algorithm", "server_args"),
        "launch:no_draft_pool",
        "SGLang asks every speculative worker but one kind for the pool of its draft model; ours has no such model",
        "the scheduler fails at start on a missing attribute",
    ),
    Hook(
        f"{_POOLS}._profile_available_bytes",
        HookType.AROUND,
        SCHEDULER,
        ("self", "pre_model_load_memory"),
        "launch:host_budget",
        "the pool is paid for in host memory; SGLang's answer becomes what the page cache may use",
        "the pool is sized by GPU memory",
    ),
    Hook(
        f"{_POOLS}.resolve_max_num_reqs",
        HookType.AROUND,
        SCHEDULER,
        ("self", "token_capacity"),
        "launch:most_requests",
        "so many requests run as the page cache has room for; SGLang counts pool tokens, of which the host has plenty",
        "thousands of requests are admitted and the page cache overflows",
    ),
    Hook(
        "sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info",
        HookType.AROUND,
        SCHEDULER,
        ("self",),
        "launch:room_to_answer",
        "a prompt that leaves no room for an answer in the pool is refused; SGLang's limit leaves it five tokens, its "
        "scheduler wants two pages",
        "such a prompt waits for ever, and every other behind it",
    ),
    *(
        Hook(
            f"{_POOLS}.{builder}",
            HookType.REPLACE,
            SCHEDULER,
            parameters,
            "launch:build_pool",
            f"builds the host pool; this builder is SGLang's {where}",
            "keys and values are stored in device memory, where our backend does not look",
        )
        for builder, parameters, where in (
            ("_build_mha_kv_pool", ("self", "max_total_num_tokens", "mha_pool_class", "quant_method"), "on CUDA"),
            ("_build_oot_mha_kv_pool", ("self", "max_total_num_tokens"), "on other platforms, the CPU among them"),
        )
    ),
    Hook(
        "sglang.srt.model_executor.runner.eager_runner.EagerRunner.__init__",
        HookType.AROUND,
        SCHEDULER,
        ("self", "model_runner"),
        "launch:small_eager_buffers",
        "its device buffers are sized by the pool's tokens, and the host has many more than a prefill takes",
        "about 48 bytes of device memory a host token are spent and were not planned",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.pool_stats_observer.PoolStats.get_decode_usage_msg_parts",
        HookType.AFTER,
        SCHEDULER,
        ("self",),
        "launch:log_counters",
        "adds our counters to the line that SGLang logs for decode batches",
        "the log does not show hits and misses",
    ),
    Hook(
        "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats",
        HookType.AFTER,
        SCHEDULER,
        ("self", "stats"),
        "launch:publish_metrics",
        "publishes our counters at /metrics whenever SGLang publishes its own",
        "/metrics lacks the names that begin with sglang:sparse_kv_",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_disk",
        HookType.AROUND,
        SCHEDULER,
        ("self", "recv_req"),
        "launch:new_weights",
        "refuses to flush the pages of requests that are paused",
        "SGLang loads the new weights, finds that it cannot flush, and ends the server",
    ),
    Hook(
        f"{_SCHEDULER}.get_internal_state",
        HookType.AFTER,
        SCHEDULER,
        ("self", "recv_req"),
        "launch:report_state",
        "adds our counters to /server_info",
        "/server_info lacks the entry sparse_kv",
    ),
    Hook(
        f"{_SCHEDULER}.set_internal_state",
        HookType.AROUND,
        SCHEDULER,
        ("self", "recv_req"),
        "launch:set_policy",
        "switches policy at run time through SGLang's own endpoint",
        "measurements need a server for each policy",
    ),
)


def register() -> None:
    """Register the hooks that add the flags; SGLang's plugin loader puts them in place."""
    for hook in HOOKS:
        if hook.group == ARGUMENTS:
            _register(hook)


def start(group: str) -> None:
    """Put a group's hooks in place and check them and those of ``ARGUMENTS``; a second call only checks.

    Raises:
        StartRefused: one of them is not in force.
    """
    needed = [hook for hook in HOOKS if hook.group in (ARGUMENTS, group)]
    for hook in needed:
        _register(hook)
    HookRegistry.apply_hooks()
    for hook in needed:
        if not in_force(hook):
            raise StartRefused(
                f"{hook.target} is not hooked in this process, and then {hook.without}; "
                "look for an error above, and uninstall plugins that hook the same place."
            )
    if group == LAUNCHER:
        _register_choices()
    if group == SCHEDULER:
        _register_backend()
    _owner("algorithm:register")()


def in_force(hook: Hook) -> bool:
    """Whether calling the target runs the hook."""
    function = getattr(_raw(hook.target), "__func__", _raw(hook.target))
    while function is not None:
        if any(cell.cell_contents is hook.function for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _register(hook: Hook) -> None:
    if any(function is hook.function for _, function, _ in HookRegistry._hooks[hook.target]):
        return
    expected, found = hook.parameters, _parameters(hook.target)
    if expected and expected != found:
        raise StartRefused(
            f"{hook.target} takes ({', '.join(found)}), not ({', '.join(expected)}) as this release expects; "
            "install the SGLang version that sglang-dualdecoder depends on."
        )
    HookRegistry.register(hook.target, hook.function, hook.kind, source=SOURCE)


def _raw(target: str) -> Any:
    owner, _, name = target.rpartition(".")
    return vars(pkgutil.resolve_name(owner))[name]


def _parameters(target: str) -> tuple[str, ...]:
    function = getattr(_raw(target), "__func__", _raw(target))
    return tuple(inspect.signature(inspect.unwrap(function)).parameters)


def _register_choices() -> None:
    # Seeds take part in sampling only in SGLang's deterministic mode, which accepts backends on its lists.
    from sglang.srt import server_args

    backends = refusals.ATTENTION_BACKEND
    if backends not in server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        server_args.add_deterministic_attention_backend_choices([backends])
        server_args.add_radix_supported_deterministic_attention_backend_choices([backends])


def _register_backend() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    if refusals.ATTENTION_BACKEND not in ATTENTION_BACKENDS:

        @register_attention_backend(refusals.ATTENTION_BACKEND)
        def build(model_runner: Any) -> Any:
            return _owner("attention:SparseKVAttnBackend")(model_runner)
