"""What sparse KV does not serve, and the one sentence that ends such a start.

An option that is in no table is taken as served. So each option of SGLang that moves keys and values, splits a
forward, or starts processes in another way belongs here until a test shows that it works.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, NoReturn

from sglang.srt.sparse_kv.config import MODE, SparseKVConfig

ATTENTION_BACKEND = MODE
ALGORITHM = MODE.upper()
# Ways to capture prefills that leave attention out of the graph; None: SGLang's choice, the first where it can.
PREFILL_BACKENDS = (None, "breakable", "disabled")

# Dense decoders whose attention is plain GQA in every layer; their code passes keys and values to the attention
# backend and writes them nowhere by itself.
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")


class StartRefused(ValueError):
    """The server cannot start as asked; the text is one sentence for the person who asked."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """One option of SGLang that sparse KV does not serve.

    Attributes:
        field: name of the field in SGLang's arguments; the flag is spelt alike.
        why: why not, as the rest of a sentence.
        instead: what to do.
        served: tells from the field's value that it is no obstacle; None serves the default alone.
    """

    field: str
    why: str
    instead: str
    served: Callable[[Any], bool] | None = None

    def sentence(self, value: Any) -> str:
        flag = "--" + self.field.replace("_", "-")
        given = flag if value is True else f"{flag} {value}"
        return f"--sparse-kv {MODE} cannot run with {given}: {self.why}; {self.instead}."


def _one(value: int) -> bool:
    return value == 1


def _breaks(graphs: Any) -> bool:
    """graphs: SGLang's, as the dictionary that was given or with all that follows from it."""
    given = graphs if isinstance(graphs, dict) or graphs is None else graphs.to_dict()
    return ((given or {}).get("prefill") or {}).get("backend") in PREFILL_BACKENDS


_NO_KV_ON_GPU = "it moves keys and values that it expects in GPU memory, and they live on the host"
_ONE_HOST_COPY = "it keeps a host copy of keys and values, and the host already has the only one"
_ONE_SEQUENCE = "it splits one sequence over ranks, and a page cache holds whole sequences"
_ROWS = "a decode step already has a row for guesses, which it never accepts"
_OWN_POOL = "it replaces the pool that keys and values live in"
_OWN_LAUNCH = "it starts processes that load no plugins"
_WHOLE_PREFILL = "its graph would hold the attention of the prefill that it was captured with"
_TWO_FORWARDS = "it runs two forwards at once, and the page cache serves one"
DROP = "drop it"

REFUSALS = (
    Refusal("pp_size", "each stage would need a pool and a plan of its own", "use --tp-size", _one),
    Refusal("nnodes", "host memory is planned for one machine", "use the GPUs of one node", _one),
    Refusal("enable_dp_attention", "its padding requests would take part in the page cache", "use --tp-size"),
    Refusal("dcp_size", _ONE_SEQUENCE, "use --tp-size", _one),
    Refusal("attn_cp_size", _ONE_SEQUENCE, "use --tp-size", _one),
    Refusal("enable_prefill_cp", _ONE_SEQUENCE, DROP),
    Refusal("enable_prefill_context_parallel", _ONE_SEQUENCE, DROP),
    Refusal("enable_lora", "SGLang serves adapters with one row a request only", "merge the adapter", lambda v: not v),
    Refusal("lora_paths", "SGLang serves adapters with one row a request only", "merge the adapter", lambda v: not v),
    Refusal("enable_mixed_chunk", "decode rows inside a prefill would bypass the page cache", DROP),
    Refusal(
        "chunked_prefill_size",
        "buffers on the GPU would have to hold the longest prompt",
        "give a positive number of tokens",
        lambda value: value is None or value > 0,
    ),
    Refusal("disaggregation_mode", _NO_KV_ON_GPU, "serve prefill and decode from one server"),
    Refusal("enable_hierarchical_cache", _ONE_HOST_COPY, "give that memory to --sparse-kv-host-memory"),
    Refusal("hicache_storage_backend", _NO_KV_ON_GPU, DROP),
    Refusal("enable_lmcache", _ONE_HOST_COPY, "give that memory to --sparse-kv-host-memory"),
    Refusal("enable_flexkv", _ONE_HOST_COPY, "give that memory to --sparse-kv-host-memory"),
    Refusal("enable_hisparse", "it is another sparse KV with a host copy of its own", "choose one of the two"),
    Refusal("speculative_algorithm", _ROWS, DROP),
    Refusal("speculative_draft_model_path", _ROWS, DROP),
    Refusal("speculative_num_steps", _ROWS, DROP),
    Refusal("speculative_eagle_topk", _ROWS, DROP),
    Refusal("speculative_num_draft_tokens", _ROWS, "choose the rows in --sparse-kv-config"),
    Refusal("kv_cache_dtype", "keys and values are kept in the model's own dtype", "use auto"),
    Refusal("enable_unified_memory", _OWN_POOL, DROP),
    Refusal("enable_page_major_kv_layout", _OWN_POOL, DROP),
    Refusal("prefill_only_disable_kv_cache", _OWN_POOL, DROP),
    Refusal("radix_cache_backend", "only SGLang's own prefix tree is known to free pages in time", DROP),
    Refusal("enable_streaming_session", "a session keeps pages outside the prefix tree", DROP),
    Refusal("enable_session_radix_cache", "a session keeps pages outside the prefix tree", DROP),
    Refusal("enable_memory_saver", "memory that the GPU shares with the host cannot be released and resumed", DROP),
    Refusal("kv_canary", "it reads keys and values on the GPU, and they live on the host", DROP),
    Refusal("enable_pdmux", _TWO_FORWARDS, DROP),
    Refusal("enable_two_batch_overlap", _TWO_FORWARDS, DROP),
    Refusal("enable_single_batch_overlap", _TWO_FORWARDS, DROP),
    Refusal(
        "enable_torch_compile", "the compiler would reorder page fetches and the attention that waits for them", DROP
    ),
    Refusal(
        "cuda_graph_backend_prefill",
        _WHOLE_PREFILL,
        "use breakable or disabled",
        lambda value: value in PREFILL_BACKENDS,
    ),
    Refusal("cuda_graph_config", _WHOLE_PREFILL, "make prefill breakable or disabled", _breaks),
    Refusal("enable_return_hidden_states", "those of the guessed row would be returned as well", DROP),
    Refusal("return_hidden_states_mode", "those of the guessed row would be returned as well", DROP),
    Refusal("dllm_algorithm", "a diffusion model decodes no token after another", DROP),
    Refusal("is_embedding", "nothing is decoded", "serve the model without --sparse-kv"),
    Refusal("encoder_only", "nothing is decoded", "serve the encoder without --sparse-kv"),
    Refusal("language_only", "its prompts come from another server's encoder", "serve text models"),
    Refusal("tokenizer_worker_num", _OWN_LAUNCH, "use one tokenizer worker", _one),
    Refusal("use_ray", _OWN_LAUNCH, "start without Ray"),
    Refusal("grpc_mode", _OWN_LAUNCH, "use the HTTP server"),
    Refusal("smg_grpc_mode", _OWN_LAUNCH, "use the HTTP server"),
    *(
        Refusal(
            field,
            f"only the backend {ATTENTION_BACKEND} reads keys and values from the host",
            DROP,
            lambda value: value in (None, ATTENTION_BACKEND),
        )
        for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    ),
)

# Variables that change what the arguments mean, and why that cannot be.
ENVIRONMENT = {
    "SGLANG_RUST_SERVER": "it starts the schedulers without the arguments of plugins",
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "it would size the pool by GPU memory",
    "SGLANG_USE_HND_KVCACHE": _OWN_POOL,
    "SGLANG_USE_CPU_ENGINE": "the CPU engine of this project is the platform torch_cpu",
}


def check_arguments(arguments: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Refuse options that sparse KV does not serve.

    Args:
        arguments: fields of SGLang's arguments that were given.
        defaults: each field's default.

    Raises:
        StartRefused: the first clash found.
    """
    for refusal in REFUSALS:
        if refusal.field not in arguments:
            continue
        value, default = arguments[refusal.field], defaults[refusal.field]
        served = value == default if refusal.served is None else refusal.served(value)
        if not served:
            raise StartRefused(refusal.sentence(value))
    for name, why in ENVIRONMENT.items():
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "on"):
            raise StartRefused(f"--sparse-kv {MODE} cannot run with {name} in the environment: {why}; unset it.")


def check_device(device: str, platform_is_ours: bool) -> None:
    """Refuse devices without an engine. ``device`` is SGLang's name of it, such as "cuda"."""
    if device == "cpu" and not platform_is_ours:
        raise StartRefused(
            f"--sparse-kv {MODE} needs the platform torch_cpu to run on a CPU; "
            "install sglang-cpu-platform, and hide the GPUs of this machine with an empty CUDA_VISIBLE_DEVICES."
        )
    if device not in ("cpu", "cuda"):
        raise StartRefused(
            f"--sparse-kv {MODE} has engines for cuda and cpu, not for {device}; choose one with --device."
        )


def check_model(model_config: Any, config: SparseKVConfig) -> None:
    """Refuse models that are not on the list of architectures, or that use attention the page cache does not serve.

    Args:
        model_config: SGLang's ``ModelConfig``.
        config: the user's configuration.

    Raises:
        StartRefused: with the reason.
    """
    hf_config = model_config.hf_text_config
    name = (getattr(model_config.hf_config, "architectures", None) or ["an unnamed architecture"])[0]
    if name not in ARCHITECTURES:
        raise StartRefused(
            f"--sparse-kv {MODE} does not serve {name}: it is tested for {', '.join(ARCHITECTURES)} only; "
            "choose such a model, or start without --sparse-kv."
        )
    reason = _windowed(hf_config) or _unlike_gqa(model_config, hf_config)
    if reason:
        raise StartRefused(
            f"--sparse-kv {MODE} does not serve this {name}: {reason}; "
            "choose another model, or start without --sparse-kv."
        )
    try:
        config.check_num_layers(model_config.num_hidden_layers)
    except ValueError as error:
        raise StartRefused(str(error)) from None


def check_ranks(kv_heads: int, tp_size: int, flag: str = "--tp-size") -> None:
    """Refuse to give one KV head to several ranks.

    Args:
        kv_heads: of the model.
        tp_size: ranks.
        flag: what the person typed.

    Raises:
        StartRefused: each would select pages by its own share of the queries, and the text depend on the ranks.
    """
    if kv_heads % tp_size:
        raise StartRefused(
            f"{flag} is {tp_size} and the model has {kv_heads} KV heads, each of which selects pages on one rank; "
            f"choose a divisor of {kv_heads}, and --dp-size for more GPUs."
        )


def _windowed(hf_config: Any) -> str | None:
    # Qwen's configuration carries a window that use_sliding_window switches; Mistral's is in force where it is set.
    window = getattr(hf_config, "sliding_window", None)
    if window and getattr(hf_config, "use_sliding_window", True):
        return f"its attention has a window of {window} tokens, and pages before it would never be read"
    if "sliding_attention" in (getattr(hf_config, "layer_types", None) or []):
        return "some of its layers attend to a window only"
    if getattr(hf_config, "dual_chunk_attention_config", None):
        return "it uses dual chunk attention"
    return None


def _unlike_gqa(model_config: Any, hf_config: Any) -> str | None:
    if model_config.head_dim != model_config.v_head_dim:
        return f"its keys have {model_config.head_dim} dimensions and its values {model_config.v_head_dim}"
    if getattr(hf_config, "attn_logit_softcapping", None):
        return "its attention caps the logits"
    return None


_from_command_line = False


def note_command_line() -> None:
    """From here on a refusal ends the process: it was started from a shell, where a traceback helps nobody."""
    global _from_command_line
    _from_command_line = True


def refuse(sentence: str) -> NoReturn:
    """End the start: SystemExit that prints the sentence on a command line, else StartRefused."""
    if _from_command_line:
        raise SystemExit(f"sglang-dualdecoder: {sentence}")
    raise StartRefused(sentence)
