"""Recall over long contexts, asked of a running server: RULER's tasks (`tasks`), scored by exact matches.

    python -m benchmark.quality.recall --url http://127.0.0.1:30000 --model MODEL --length 1024 2048 --prompts 10

Works with any server that has OpenAI's /v1/completions and serves MODEL, whose tokenizer counts tokens and writes the
chat. With --budget, a sparse server started with "debug" is asked once for every budget; the prompts stay prefilled.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
from transformers import AutoTokenizer

from benchmark.quality.tasks import TASKS, Prompt, prompts
from benchmark.serving.record import facts

TIMEOUT = 1800  # seconds for one answer: a long prompt may wait behind others


def render(tokenizer, prompt: Prompt) -> str:
    """The prompt as a chat in the model's template, the answer begun; plain text for models without one."""
    if tokenizer.chat_template is None:
        return f"{prompt.text}\n{prompt.answer_start}"
    turn = [{"role": "user", "content": prompt.text}]
    chat = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return chat + prompt.answer_start


def ask(url: str, text: str, tokens: int) -> str:
    """The greedy continuation of a text. Raises requests.HTTPError with the server's own words."""
    body = {"model": "default", "prompt": text, "max_tokens": tokens, "temperature": 0}
    reply = requests.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT)
    if not reply.ok:
        raise requests.HTTPError(f"{reply.status_code} from {url}: {reply.text[:300]}")
    return reply.json()["choices"][0]["text"]


def set_budget(url: str, budget: int) -> None:
    """Switches the budget of a sparse server started with "debug". Raises requests.HTTPError."""
    body = {"server_args": {"sparse_kv.budget": budget}}
    reply = requests.post(f"{url}/set_internal_state", json=body, timeout=TIMEOUT)
    if not reply.ok or "false" in reply.text.lower():
        raise requests.HTTPError(f"{url} did not take budget {budget}: {reply.text[:300]}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="RULER's recall tasks against a running server.")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--model", required=True, help="the served model's folder, for its tokenizer")
    parser.add_argument("--task", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument(
        "--length", nargs="+", type=int, default=[1024], help="tokens of a prompt, the answer not counted"
    )
    parser.add_argument("--prompts", type=int, default=10, help="of every task and length")
    parser.add_argument("--budget", nargs="+", type=int, default=[0], help="tokens; 0: as the server is")
    parser.add_argument("--parallel", type=int, default=4, help="requests at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write scores and answers there too")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    rows = []
    print(f"{'task':16} {'length':>7} {'budget':>7} {'score':>7}")
    for length in args.length:
        for task in args.task:
            made = prompts(task, length, args.prompts, count, args.seed)
            texts = [render(tokenizer, prompt) for prompt in made]
            for budget in args.budget:
                try:
                    if budget:
                        set_budget(args.url, budget)
                    with ThreadPoolExecutor(args.parallel) as pool:
                        answers = list(pool.map(lambda p, t: ask(args.url, t, p.tokens), made, texts))
                except requests.RequestException as error:
                    print(f"error: {error}", file=sys.stderr)
                    return 1
                scores = [prompt.score(answer) for prompt, answer in zip(made, answers)]
                score = sum(scores) / len(scores)
                print(f"{task:16} {length:7} {budget or 'as is':>7} {score:7.1%}", flush=True)
                asked = [
                    {"references": prompt.references, "answer": answer, "prompt_tokens": count(text)}
                    for prompt, answer, text in zip(made, answers, texts)
                ]
                rows.append({"task": task, "length": length, "budget": budget, "score": score, "asked": asked})
    if args.json:
        about = facts("benchmark.quality.recall", argv) | {"seed": args.seed, "backend": args.url}
        args.json.write_text(json.dumps(about | {"rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
