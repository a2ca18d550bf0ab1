"""Entry point of the DualDecoder plugin for SGLang, and what SGLang pickles to its children.

Imports nothing but the standard library: it loads in every process, and children unpickle from here before any
plugin is loaded.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os

SGLANG_VERSION = "0.5.17"
_HERE = os.path.dirname(os.path.abspath(__file__))
_OVERLAY = os.path.join(_HERE, "sglang")


def register() -> None:
    """Add the ``--sparse-kv`` flags. SGLang calls this in every process that loads plugins."""
    find_overlay()
    from sglang.srt.sparse_kv import plugin

    plugin.register()


def version_problem() -> str | None:
    """One sentence when the installed SGLang is not the version this release is written for."""
    from sglang.version import __version__

    if __version__.partition("+")[0] == SGLANG_VERSION:
        return None
    return (
        f"sglang-dualdecoder hooks into SGLang {SGLANG_VERSION} and found {__version__}; "
        f"install sglang=={SGLANG_VERSION}, or start without --sparse-kv."
    )


def run_scheduler_process(inner, refused, server_args, *args, **kwargs) -> None:
    """Run a scheduler process with our hooks in place, or not at all.

    Args:
        inner: what SGLang would run: its ``run_scheduler_process``.
        refused: queue for the reason, one sentence, when this process refuses to start.
        server_args: SGLang's arguments; the rest are ``inner``'s own.
    """
    try:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        find_overlay()
        from sglang.srt.sparse_kv import plugin

        try:
            plugin.start(plugin.SCHEDULER)
        except ValueError as error:
            raise SystemExit(str(error)) from None
        inner(server_args, *args, **kwargs)
    except SystemExit as stop:
        if not isinstance(stop.code, str):
            raise
        refused.put(stop.code)
        raise SystemExit(1) from None


def find_overlay() -> None:
    """Make ``sglang.srt.sparse_kv`` importable where SGLang's own files lie elsewhere.

    A regular install puts our files among SGLang's and needs no help, nor does an editable install of ours. Two cases
    remain: this file run from a source tree on the path, and an SGLang that is itself installed editable.
    """
    import sglang.srt

    if importlib.util.find_spec("sglang.srt.sparse_kv") is None:
        # A plain list: Python would rebuild its own kind of path, and forget ours, when it looks for packages again.
        sglang.srt.__path__ = [*sglang.srt.__path__, os.path.join(_OVERLAY, "srt")]
