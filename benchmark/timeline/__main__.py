"""Record decode steps of a running server as a timeline:

python -m benchmark.timeline --url http://127.0.0.1:30000 --out timeline.json --svg timeline.svg
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmark.timeline import draw, lanes, prefill, record

PROMPT = "".join(
    f"Line {number}: on day {number * 7 % 365} the ship logged {number * 31 % 97} knots.\n" for number in range(2000)
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.timeline", description="Record decode steps as a timeline."
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="a server with sparse KV, on this machine")
    parser.add_argument("--steps", type=int, default=8, help="decode steps to record")
    parser.add_argument("--requests", type=int, default=1, help="requests that decode together")
    parser.add_argument("--characters", type=int, default=6000, help="length of each request's prompt")
    parser.add_argument("--prompt", type=Path, help="a text file to take the prompt from")
    parser.add_argument("--profile", type=Path, help="a profile that SGLang has written, instead of recording one")
    parser.add_argument("--prefill", action="store_true", help="the profile is of one prefill, not of decode steps")
    parser.add_argument("--layers", type=int, help="layers of the model, with --profile")
    parser.add_argument("--out", type=Path, default=Path("timeline.json"), help="for ui.perfetto.dev")
    parser.add_argument("--svg", type=Path, help="also draw a picture of the first layers of the last step")
    parser.add_argument("--svg-layers", type=int, default=6)
    parser.add_argument("--title", help="of the picture")
    options = parser.parse_args(argv)
    try:
        run(options)
    except (ValueError, TimeoutError, OSError) as error:
        print(f"timeline: {error}", file=sys.stderr)
        return 1
    return 0


def run(options: argparse.Namespace) -> None:
    about: dict[str, Any]
    if options.prefill and not options.profile:
        raise ValueError("--prefill needs a --profile that SGLang has written of one prefill")
    if options.profile:
        if not options.layers:
            raise ValueError("--profile does not say how many layers the model has; add --layers")
        profile, about = record.load(options.profile), {"layers": options.layers, "profile": options.profile.name}
    else:
        about = record.describe(options.url)
        prompt = (options.prompt.read_text() if options.prompt else PROMPT)[: options.characters]
        with tempfile.TemporaryDirectory() as folder:
            profile = record.record(options.url, Path(folder), options.steps, about["device"], prompt, options.requests)
        about |= {"requests": options.requests, "characters": len(prompt)}
    if options.prefill:
        events, rows, of = prefill.read(profile, about["layers"]), prefill.LANES, "one prefill"
        figures = prefill.summary(events)
    else:
        events, rows, of = lanes.number(lanes.read(profile), about["layers"]), lanes.LANES, "one decode step"
        figures = lanes.summary(events)
    options.out.write_text(json.dumps(lanes.chrome(events, {**about, "summary": figures}, rows)))
    for name, value in figures.items():
        print(f"{name:<31} {value:8.3f}" + ("" if "share" in name else " ms" if options.prefill else " ms a step"))
    print(f"{1 + max(event.step for event in events)} steps in {options.out}: open it at https://ui.perfetto.dev")
    if options.svg:
        last = max(event.step for event in events)
        said = f"{about.get('device', 'profile')}, {about.get('requests', '?')} request(s): layers of {of}"
        options.svg.write_text(draw.svg(events, last, 0, options.svg_layers, options.title or said, rows))
        print(f"picture in {options.svg}")


if __name__ == "__main__":
    sys.exit(main())
