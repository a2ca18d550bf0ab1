"""What tests run in a child process that Python spawns: it must be importable there."""

from __future__ import annotations

import sys


def report_and_refuse(server_args, answers) -> None:
    """Stands for SGLang's ``run_scheduler_process``: tell what is in force in this process, then refuse to start."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.sparse_kv import launch, plugin
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    answers.put(
        {
            "config": server_args._sparse_kv,
            "hooks": sorted(hook.target for hook in plugin.HOOKS if plugin.in_force(hook)),
            "backend": "dualdecoder" in ATTENTION_BACKENDS,
            "algorithm": SpeculativeAlgorithm.from_string("DUALDECODER").name,
        }
    )
    try:
        with launch._refusing():
            raise ValueError("there is no room")
    except Exception as error:  # as SGLang does
        answers.put(repr(error))


def modules_after_loading(answers) -> None:
    """Load plugins as a process without sparse KV does; tell which of our modules that imports."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    answers.put(
        {
            "hooked": sorted(
                target
                for target in HookRegistry._patched
                if any(source.dist_name == "sglang-dualdecoder" for _, _, source in HookRegistry._hooks[target])
            ),
            "modules": sorted(name for name in sys.modules if name.startswith("sglang.srt.sparse_kv")),
            "schedulers": "sglang.srt.managers.scheduler" in sys.modules,
        }
    )
