"""What a user may say about sparse KV, validated once.

The configuration crosses process borders as a plain dict (``SparseKVConfig.to_dict``), because child
processes unpickle SGLang's arguments before any plugin code can be imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Mapping
from typing import Any

MODE = "dualdecoder"
PAGE_SIZES = (8, 16, 32)
DEFAULT_PAGE_SIZE = 16
DEFAULT_BUDGET = 1664
DEFAULT_WHOLE = 2048

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*|%)\s*", re.IGNORECASE | re.ASCII)
_SIZE_HELP = 'write a size such as "96GB", "64GiB" or "50%"'
ROWS = ("auto", 1, 2)
_GUIDES = ("chain", "lookup", "resync", "none")
_LOOKUP_GUIDES = ("lookup", "resync")


def shown(value: Any) -> str:
    """A value for people: as Python writes it, cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, of lists in lists
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= 80 else f"{text[:60]}..."


def parse_size(value: int | str, total: int | None = None, name: str = "size") -> int:
    """Turn a size into bytes.

    Args:
        value: bytes as an int, or text: a number with an optional unit (KB, MB, GB, TB are powers of 1000;
            KiB, MiB, GiB, TiB powers of 1024), or a percentage of ``total``.
        total: bytes that a percentage refers to; without it a percentage is an error.
        name: how an error names the value.

    Returns:
        A positive number of bytes, rounded down.

    Raises:
        ValueError: not a size, not positive, or a percentage above 100 or without a total.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{name} is {shown(value)}, which is not a size; {_SIZE_HELP}.")
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.fullmatch(value)
        unit = match.group(2).lower() if match else None
        if match is None or (unit != "%" and unit not in _UNITS):
            raise ValueError(f"{name} is {shown(value)}, which is not a size; {_SIZE_HELP}.")
        if len(match.group(1)) > 30:
            raise ValueError(f"{name} is {shown(value)}, more than any machine has; {_SIZE_HELP}.")
        number = float(match.group(1))
        if unit == "%":
            if number > 100:
                raise ValueError(f"{name} is {shown(value)}, more than there is; give at most 100%.")
            if total is None:
                raise ValueError(f"{name} is {shown(value)}, but nothing is known to take a share of; {_SIZE_HELP}.")
            size = int(total * number / 100)
        else:
            # Integers stay exact: a float cannot hold every byte count.
            exact = int(match.group(1)) if match.group(1).isdigit() else number
            size = int(exact * _UNITS[unit])
    if size <= 0:
        raise ValueError(f"{name} is {shown(value)}, which leaves no memory; {_SIZE_HELP}.")
    return size


@dataclasses.dataclass(frozen=True)
class SparseKVConfig:
    """Everything the user decides. Build it with ``from_dict``, which validates.

    Attributes:
        budget: tokens attended per request, layer and kv head, beside sinks and window.
        host_memory: "auto", or the host KV of all ranks together, as ``parse_size`` reads it.
        guide: "chain" (row 1 continues its own guesses), "lookup" (what followed the last tokens before), "resync" (the
            chain, and a lookup where it was wrong) or "none" (one row per request).
        rows: rows of a request in a decode step: 2, 1, or "auto" (each step has one where all pages of the running
            requests fit the page cache, else two).
        guide_attends: "selected" (row 1 attends to the pages that row 0 selected) or "own" (to those that it would
            select itself, as far as they are cached).
        residency: layers whose cache is their own: "auto" (the planner decides), "all", "none", a fraction of the
            layers, or layer ids.
        sinks: tokens at the start of a context that are always attended.
        window: most recent tokens that are always attended.
        whole: tokens; a shorter context is attended whole. "auto": 2048, or 0 with a budget below the default.
        hysteresis: how much better a page has to score, in nats of log-probability, than one that the request's last
            step selected, to take its place, 0..10.
        prefetch: fetch predicted pages ahead of their layer.
        prefetch_floor: least chance of a right guess, by the request's record, that is worth a fetch ahead, 0..1.
        lookahead: layers, counted from the last, that fetch at the start of the next step, or "auto" (the planner
            decides, by the number of requests).
        prefetch_cap: most pages fetched ahead per request, layer, kv head and step, as a share of the budget, 0..1.
        cache_memory: "auto", or the bytes of the page cache of one rank, as ``parse_size`` reads it.
        ring: layer-sized buffers that the non-resident layers share, 2..4.
        coupled_sampling: at temperature > 0, both rows draw with one noise per (request, position, token).
        seed: start of the noise streams.
        debug: run-time policy switches and invariant checks.
        record: a file that every decode step's selections are written to, for studies; "" for none. Needs debug.
    """

    budget: int = DEFAULT_BUDGET
    host_memory: int | str = "auto"
    guide: str = "resync"
    rows: str | int = "auto"
    guide_attends: str = "selected"
    residency: str | float | tuple[int, ...] = "auto"
    sinks: int = 16
    window: int = 64
    whole: int | str = "auto"
    hysteresis: float = 2.0
    prefetch: bool = True
    prefetch_floor: float = 0.25
    lookahead: int | str = "auto"
    prefetch_cap: float = 1.0
    landing: bool = True
    cache_memory: int | str = "auto"
    ring: int = 3
    coupled_sampling: bool = True
    seed: int = 0
    debug: bool = False
    record: str = ""

    @property
    def most_rows(self) -> int:
        """Rows that one request occupies in a decode step at most."""
        return 1 if self.guide == "none" or self.rows == 1 else 2

    @property
    def keeps_history(self) -> bool:
        """Whether the tokens of running requests are kept on the device, for a guide that looks them up."""
        return self.most_rows == 2 and (self.guide in _LOOKUP_GUIDES or self.debug)

    def whole_at(self, budget: int) -> int:
        """Tokens below which a context is attended whole where the budget is so many: "auto" keeps to a small one."""
        if isinstance(self.whole, int):
            return self.whole
        return DEFAULT_WHOLE if budget >= DEFAULT_BUDGET else 0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SparseKVConfig:
        """Build a configuration from builtins.

        Raises:
            ValueError: unknown key, wrong type or value out of range; the text is one sentence.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, n=1)
                hint = f"perhaps {near[0]!r} was meant." if near else f"known keys are {', '.join(names)}."
                raise ValueError(f"{shown(key)} is no sparse KV setting; {hint}")
        values = dict(values)
        if isinstance(values.get("residency"), (list, tuple)):
            values["residency"] = tuple(values["residency"])
        config = cls(**values)
        config._validate()
        return config

    def to_dict(self) -> dict[str, Any]:
        """The configuration as builtins that JSON and pickle carry; ``from_dict`` reads it back."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if isinstance(self.residency, tuple):
            values["residency"] = list(self.residency)
        return values

    def check_page_size(self, page_size: int) -> None:
        """Raise ValueError unless ``page_size`` (tokens) is supported and the budget holds one page."""
        if page_size not in PAGE_SIZES:
            allowed = ", ".join(map(str, PAGE_SIZES))
            raise ValueError(f"--page-size is {page_size}, but sparse KV supports {allowed}; choose one of them.")
        if self.budget < page_size:
            raise ValueError(
                f"--sparse-kv-budget is {self.budget} tokens, less than one page of {page_size}; "
                f"raise the budget to at least {page_size} or lower --page-size."
            )

    def check_num_layers(self, num_layers: int) -> None:
        """Raise ValueError if ``residency`` names a layer outside ``range(num_layers)``."""
        if isinstance(self.residency, tuple):
            for layer in self.residency:
                if layer >= num_layers:
                    raise ValueError(
                        f"residency names layer {layer}, but the model has {num_layers} layers; "
                        f"use ids from 0 to {num_layers - 1}."
                    )

    def _validate(self) -> None:
        _check_int("budget", self.budget, low=1)
        _check_int("sinks", self.sinks, low=0)
        _check_int("window", self.window, low=0)
        _check_number("hysteresis", self.hysteresis, low=0, high=10)
        for name, low in (("whole", 0), ("lookahead", 1)):
            value = getattr(self, name)
            if isinstance(value, str):
                _check_choice(name, value, ("auto",), more=" or a whole number")
            else:
                _check_int(name, value, low=low)
        _check_int("ring", self.ring, low=2, high=4)
        _check_int("seed", self.seed, low=0, high=2**63 - 1)
        _check_number("prefetch_cap", self.prefetch_cap, low=0, high=1)
        _check_number("prefetch_floor", self.prefetch_floor, low=0, high=1)
        _check_choice("guide", self.guide, _GUIDES)
        if self.rows not in ROWS or isinstance(self.rows, (bool, float)):
            raise ValueError(f"rows is {shown(self.rows)}; use 'auto', 1 or 2.")
        _check_choice("guide_attends", self.guide_attends, ("selected", "own"))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise ValueError(f"{field.name} is {shown(value)}; give true or false.")
        for name in ("host_memory", "cache_memory"):
            size = getattr(self, name)
            if size != "auto":
                # What a percentage refers to is known only to the planner; any total shows whether it reads.
                parse_size(size, total=2**50, name=name)
        if not isinstance(self.record, str):
            raise ValueError(f"record is {shown(self.record)}; give the path of a file.")
        if self.record and not self.debug:
            raise ValueError(f'record is {shown(self.record)}, and only a debug server records; add "debug": true.')
        self._validate_residency()

    def _validate_residency(self) -> None:
        residency = self.residency
        if isinstance(residency, str):
            _check_choice(
                "residency",
                residency,
                ("auto", "all", "none"),
                more=", a fraction from 0 to 1 or a list of layer ids",
            )
        elif isinstance(residency, tuple):
            for layer in residency:
                _check_int("residency", layer, low=0)
            if len(set(residency)) != len(residency):
                raise ValueError(f"residency names a layer twice in {list(residency)}; name each layer once.")
        else:
            _check_number("residency", residency, low=0, high=1)


def config_from_arguments(
    mode: str | None,
    budget: int | str | None = None,
    host_memory: int | str | None = None,
    more: str | Mapping[str, Any] | None = None,
) -> SparseKVConfig | None:
    """Combine the four ``--sparse-kv*`` arguments; None when sparse KV is off.

    Args:
        mode: value of ``--sparse-kv``; None leaves it off.
        budget: value of ``--sparse-kv-budget``, tokens, as a number or as text.
        host_memory: value of ``--sparse-kv-host-memory``.
        more: value of ``--sparse-kv-config``, JSON text or an already parsed mapping.

    Raises:
        ValueError: a bad value, a value given twice, or a value given while sparse KV is off.
    """
    if isinstance(budget, str):
        try:
            budget = int(budget)
        except ValueError:
            raise ValueError(f"--sparse-kv-budget is {shown(budget)}; give a whole number of tokens.") from None
    flags = {"budget": budget, "host_memory": host_memory}
    given = {key: value for key, value in flags.items() if value is not None}
    if mode is None:
        if given or more is not None:
            name = "config" if not given else next(iter(given)).replace("_", "-")
            raise ValueError(f"--sparse-kv-{name} has no effect alone; add --sparse-kv {MODE} or drop it.")
        return None
    if mode != MODE:
        raise ValueError(f"--sparse-kv is {shown(mode)}, which is no known mode; use {MODE!r}.")
    values = _read_config(more)
    for key, value in given.items():
        if key in values:
            flag = f"--sparse-kv-{key.replace('_', '-')}"
            raise ValueError(f"{key} is given both by {flag} and in --sparse-kv-config; keep one of them.")
        values[key] = value
    return SparseKVConfig.from_dict(values)


def _read_config(more: str | Mapping[str, Any] | None) -> dict[str, Any]:
    if more is None:
        return {}
    if isinstance(more, str):
        try:
            more = json.loads(more, object_pairs_hook=_unique_keys, parse_int=_whole)
        except RecursionError:
            raise ValueError("--sparse-kv-config nests too deep; give an object of settings.") from None
        except json.JSONDecodeError as error:
            raise ValueError(
                f"--sparse-kv-config is no valid JSON ({error.msg} at character {error.pos}); "
                'give an object such as {"guide": "none"}.'
            ) from None
    if not isinstance(more, Mapping):
        raise ValueError(f'--sparse-kv-config is {shown(more)}; give a JSON object such as {{"guide": "none"}}.')
    return dict(more)


def _whole(digits: str) -> int:
    if len(digits) > 30:
        raise ValueError(f"--sparse-kv-config holds a number of {len(digits)} digits; give a smaller one.")
    return int(digits)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"--sparse-kv-config gives {shown(key)} twice; keep one of them.")
        values[key] = value
    return values


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {shown(value)}; give a whole number.")
    _check_range(name, value, low, high)


def _check_number(name: str, value: Any, low: float, high: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise ValueError(f"{name} is {shown(value)}; give a number.")
    _check_range(name, value, low, high)


def _check_range(name: str, value: float, low: float, high: float | None) -> None:
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} is {shown(value)}, out of range; give a value {allowed}.")


def _check_choice(name: str, value: Any, choices: tuple[str, ...], more: str = "") -> None:
    if not isinstance(value, str) or value not in choices:
        allowed = ", ".join(map(repr, choices))
        raise ValueError(f"{name} is {shown(value)}; use {allowed}{more}.")
