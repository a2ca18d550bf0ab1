"""The ``--sparse-kv*`` arguments: flags, keywords of ``sgl.Engine``, and the arguments of SGLang that follow from them.

SGLang's ``ServerArgs`` gets no new field. What the user said is kept in its attribute ``_sparse_kv``, a dict of
builtins: children unpickle it before any plugin is loaded, and its name keeps it out of the fields that SGLang
freezes and lists.
"""

from __future__ import annotations

import argparse
import contextvars
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import sglang_dualdecoder
from sglang.srt.sparse_kv import dense, devices, model_shape, refusals, split
from sglang.srt.sparse_kv.config import DEFAULT_PAGE_SIZE, MODE, SparseKVConfig, config_from_arguments
from sglang.srt.sparse_kv.refusals import StartRefused

logger = logging.getLogger(__name__)

ATTRIBUTE = "_sparse_kv"
KEYWORDS = ("sparse_kv", "sparse_kv_budget", "sparse_kv_host_memory", "sparse_kv_config")

# Keys of --sparse-kv-config: what has no flag of its own.
SETTINGS = [f.name for f in dataclasses.fields(SparseKVConfig) if f"sparse_kv_{f.name}" not in KEYWORDS]

# Tokens of a prefill up to which CUDA graphs hold what lies between its layers' attention. By reckoning, not measured:
# from about so many on an H200 takes as long for the products of an 8B model as a host for its orders, and graphs of
# whole chunks, SGLang's own choice, would save nothing.
GRAPH_TOKENS = 1024

# Carries the flags from the parsed namespace to the constructor, between which SGLang passes only its own fields.
_flags: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("sparse_kv_flags", default=None)


def config_of(server_args: Any) -> SparseKVConfig | None:
    """The configuration that a ``ServerArgs`` carries, None when sparse KV is off."""
    values = getattr(server_args, ATTRIBUTE, None)
    return None if values is None else SparseKVConfig.from_dict(values)


def add_flags(result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER ``ServerArgs.add_cli_args``. Values stay text: argparse answers a bad one with all of SGLang's usage."""
    group = parser.add_argument_group(
        "sparse KV", "Keep keys and values in host memory and attend to the pages that matter."
    )
    group.add_argument(
        "--sparse-kv",
        metavar=MODE,
        help=f"Turn sparse KV on. The only mode is {MODE}: decode with a guide token that "
        "predicts the pages of the next step.",
    )
    group.add_argument(
        "--sparse-kv-budget",
        metavar="TOKENS",
        help="Tokens attended per request, layer and KV head, beside sinks and window. Default: 1664.",
    )
    group.add_argument(
        "--sparse-kv-host-memory",
        metavar="SIZE",
        help='Host memory for keys and values of all ranks: "auto", a size such as 96GB, or a share such as 50%%. '
        "Default: auto, at most 80%% of what is available; 2GB on a CPU.",
    )
    group.add_argument(
        "--sparse-kv-config",
        metavar="JSON",
        help=f"More settings as a JSON object: {', '.join(SETTINGS)}.",
    )


def from_command_line(original: Callable, cls: type, args: argparse.Namespace) -> Any:
    """AROUND ``ServerArgs.from_cli_args``: keep our flags, and answer a refusal without a traceback."""
    flags = {name: getattr(args, name, None) for name in KEYWORDS}
    if all(value is None for value in flags.values()):
        return original(cls, args)
    refusals.note_command_line()
    token = _flags.set(flags)
    try:
        return original(cls, args)
    except StartRefused as refused:
        refusals.refuse(str(refused))
    finally:
        _flags.reset(token)


def initialise(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND ``ServerArgs.__init__``: take our keywords and set what follows, before SGLang resolves the rest."""
    flags = _flags.get() or {}
    ours = {name: kwargs.pop(name, flags.get(name)) for name in KEYWORDS}
    # A ServerArgs that resolving this one creates must not take the flags for its own.
    token = _flags.set(None)
    try:
        config = _read(ours)
        if config is not None:
            fields = [field for field in dataclasses.fields(type(self)) if field.init]
            kwargs.update(zip((field.name for field in fields), args, strict=False))
            args = ()
            _check(kwargs, fields, config)
            from sglang.srt.sparse_kv import plugin

            plugin.start(plugin.LAUNCHER)
            kwargs.update(_derived(kwargs, config))
            setattr(self, ATTRIBUTE, config.to_dict())
        original(self, *args, **kwargs)
    finally:
        _flags.reset(token)


def check_model(self: Any) -> None:
    """BEFORE ``ServerArgs._handle_model_specific_adjustments``: the model is known, and nothing follows from it yet."""
    config = config_of(self)
    if config is not None:
        model = self.get_model_config()
        refusals.check_model(model, config)
        refusals.check_ranks(model.get_total_num_kv_heads(), self.tp_size)


def _read(ours: dict[str, Any]) -> SparseKVConfig | None:
    try:
        return config_from_arguments(*(ours[name] for name in KEYWORDS))
    except ValueError as error:
        raise StartRefused(str(error)) from None


def _check(kwargs: dict[str, Any], fields: list[dataclasses.Field], config: SparseKVConfig) -> None:
    problem = sglang_dualdecoder.version_problem()
    if problem:
        raise StartRefused(problem)
    refusals.check_arguments(kwargs, {field.name: field.default for field in fields})
    refusals.check_device(_device(kwargs), _platform_is_ours())
    try:
        config.check_page_size(kwargs.get("page_size") or DEFAULT_PAGE_SIZE)
    except ValueError as error:
        raise StartRefused(str(error)) from None


def _derived(kwargs: dict[str, Any], config: SparseKVConfig) -> dict[str, Any]:
    """Arguments of SGLang that sparse KV decides."""
    derived = {
        "speculative_algorithm": refusals.ALGORITHM,
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": config.most_rows,
        "attention_backend": refusals.ATTENTION_BACKEND,
        "page_size": kwargs.get("page_size") or DEFAULT_PAGE_SIZE,
    }
    if _device(kwargs) == "cpu":
        # SGLang's relay between overlapped steps records streams, which CPU tensors cannot.
        return derived | {"disable_overlap_schedule": True, "disable_cuda_graph": True}
    if kwargs.get("chunked_prefill_size") is None and (chunk := _chunk(kwargs, config)):
        derived["chunked_prefill_size"] = chunk
    if all(kwargs.get(f"cuda_graph_{name}_prefill") is None for name in ("max_bs", "bs")):
        derived["cuda_graph_max_bs_prefill"] = GRAPH_TOKENS  # what cuda_graph_config says comes before it
        if kwargs.get("mem_fraction_static") is None and not _captures_prefills(kwargs | derived):
            derived["disable_prefill_cuda_graph"] = True
    return derived


def _captures_prefills(kwargs: dict[str, Any]) -> bool:
    device = devices.find(devices.this_gpu() or "")
    if device is None:
        return True
    chunk = kwargs.get("chunked_prefill_size") or dense.default_chunk(device.memory)
    return dense.captures_prefills(device.memory, kwargs.get("tp_size") or 1, chunk)


def _chunk(kwargs: dict[str, Any], config: SparseKVConfig) -> int | None:
    """Tokens of a prefill chunk, None to leave the choice to SGLang: its own hides the transfer of prefixes, or the
    model or the GPU is not known yet.
    """
    device = devices.find(devices.this_gpu() or "")
    if device is None:
        return None
    page_size, tp = kwargs.get("page_size") or DEFAULT_PAGE_SIZE, kwargs.get("tp_size") or 1
    try:
        shape = model_shape.read(str(kwargs["model_path"]), config)
    except (ValueError, KeyError):
        return None
    context = kwargs.get("context_length") or shape.context
    load = split.load_of(config, shape.geometry(config, page_size, tp, context), shape.weights(tp))
    usual, chosen = dense.default_chunk(device.memory), dense.chunk(load, device, device.memory)
    if chosen == usual:
        return None
    logger.info("Prefill in chunks of %d tokens instead of %d, to hide the transfer of their prefix", chosen, usual)
    return chosen


def _device(kwargs: dict[str, Any]) -> str:
    from sglang.srt.utils import get_device

    return (kwargs.get("device") or get_device()).split(":")[0]


def _platform_is_ours() -> bool:
    from sglang.srt.platforms import current_platform

    return type(current_platform).__module__.startswith("sglang_cpu_platform")
