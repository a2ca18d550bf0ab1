"""Entry point of the DualDecoder plugin for SGLang, and what SGLang pickles to its children.

Imports nothing but the standard library: it loads in every process, and children unpickle from here before any
plugin is loaded.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import types

SGLANG_VERSION = "0.5.17"
_OVERLAY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sglang")


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
        refused: writing end of a pipe for the reason, one sentence, when this process refuses to start.
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
        refused.send(stop.code)
        if server_args.dp_size > 1:
            # The process that started this one waits for its report, without looking whether it lives.
            os.kill(os.getppid(), signal.SIGTERM)
        raise SystemExit(1) from None


def main() -> None:
    """The console script ``sglang-sparse-kv``."""
    if sys.argv[1:2] == ["doctor"]:
        find_overlay()
    else:
        _leave_sglang_out()
    from sglang.srt.sparse_kv import command

    sys.exit(command.main(sys.argv[1:]))


def _leave_sglang_out() -> None:
    """Let empty packages stand in for SGLang's: planning is arithmetic, and SGLang and torch take seconds to import."""
    for name, folder in (("sglang", _OVERLAY), ("sglang.srt", os.path.join(_OVERLAY, "srt"))):
        package = types.ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package


def find_overlay() -> None:
    """Make ``sglang.srt.sparse_kv`` importable where neither the folders nor the start-up file already do.

    That is so when this file is run from a source tree on the path.
    """
    import sglang.srt

    if importlib.util.find_spec("sglang.srt.sparse_kv") is None:
        # A plain list: Python would rebuild its own kind of path, and forget ours, when it looks for packages again.
        sglang.srt.__path__ = [*sglang.srt.__path__, os.path.join(_OVERLAY, "srt")]


def keep_sglang_importable() -> None:
    """Called at every start of Python, by ``sglang_dualdecoder.pth``: see that ``sglang`` means SGLang.

    Where SGLang's files lie elsewhere, our folder ``sglang`` holds no ``__init__.py``, and Python takes it for a
    package of its own before it asks how an editable install is found.
    """
    if os.path.isdir(_OVERLAY) and not os.path.isfile(os.path.join(_OVERLAY, "__init__.py")):
        sys.meta_path.insert(0, _SGLangElsewhere)


class _SGLangElsewhere:
    """Finds SGLang itself wherever it is, and lets its folders continue in ours."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "sglang":
            return None
        for finder in sys.meta_path:
            if finder is _SGLangElsewhere:
                continue
            spec = finder.find_spec(name, path, target)
            # What is found without an origin is a folder that nobody claims, ours.
            if spec is not None and spec.origin is not None:
                folders = spec.submodule_search_locations
                if folders is not None and _OVERLAY not in folders:
                    folders.append(_OVERLAY)
                return spec
        return None
