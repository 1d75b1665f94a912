"""Detects vLLM's parsers of tool calls and reasoning from a model's type and chat template.

The template shows the form of tool calls better than the type: Qwen3 and Qwen3-Coder have the same type, but different
tool calls. Reasoning is detected where the template begins an answer, so that the whole answer of an Instruct model of
a reasoning family is not parsed as a thought.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class Parsers(NamedTuple):
    tools: str | None
    reasoning: str | None


class Sign(NamedTuple):
    """A parser and its conditions: the model has one of `types` (if any), and the text has all of `words`."""

    parser: str
    types: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


DEEPSEEK_CALLS = "<\uff5ctool\u2581call\u2581begin\uff5c>"
TOOLS = (  # the first match wins
    Sign("openai", types=("gpt_oss",)),
    Sign("llama4_pythonic", types=("llama4", "llama4_text")),
    Sign("kimi_k2", words=("<|tool_calls_section_begin|>",)),
    Sign("minimax_m2", words=("<minimax:tool_call>",)),
    Sign("seed_oss", words=("<seed:tool_call>",)),
    Sign("functiongemma", words=("<start_function_call>",)),
    Sign("gemma4", types=("gemma4", "gemma4_text", "gemma4_unified")),
    Sign("deepseek_v3", words=(DEEPSEEK_CALLS, "```json")),
    Sign("deepseek_v31", words=(DEEPSEEK_CALLS,)),
    Sign("mistral", words=("[TOOL_CALLS]",)),
    Sign("glm45", words=("<tool_call>", "<arg_key>")),
    Sign("qwen3_coder", words=("<tool_call>", "<function=")),
    Sign("hermes", words=("<tool_call>", "arguments")),
    Sign("granite4", types=("granitemoehybrid",), words=("tool_call",)),
    Sign("granite", types=("granite", "granitemoe"), words=("<|tool_call|>",)),
    Sign("phi4_mini_json", types=("phi3",), words=("<|tool|>",)),
    Sign("llama3_json", types=("llama",), words=("ipython",)),
    Sign("jamba", words=("<tool_calls>",)),
)
REASONING = (  # words: after `add_generation_prompt`
    Sign("openai_gptoss", types=("gpt_oss",)),
    Sign("gemma4", types=("gemma4", "gemma4_text", "gemma4_unified")),
    Sign("mistral", types=("mistral", "mistral3", "ministral3"), words=("[THINK]",)),
    Sign("glm45", types=("glm4_moe",), words=("<think>",)),
    Sign("minimax_m2", types=("minimax_m2",), words=("<think>",)),
    Sign("seed_oss", types=("seed_oss",), words=("think>",)),
    Sign("deepseek_v3", types=("deepseek_v3", "deepseek_v32"), words=("<think>", "thinking")),
    Sign("deepseek_r1", types=("deepseek_v3", "llama"), words=("<think>",)),
    Sign("qwen3", types=("qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"), words=("<think>",)),
)
BEGINS_AN_ANSWER = "add_generation_prompt"


def parsers_of(model_type: str, template: str) -> Parsers:
    """Each is None if no parser matches: the template has no tool calls, or does not begin a thought."""
    beginning = template.rpartition(BEGINS_AN_ANSWER)[2]
    return Parsers(_first(TOOLS, model_type, template), _first(REASONING, model_type, beginning))


def _first(signs: tuple[Sign, ...], model_type: str, text: str) -> str | None:
    fits = (
        sign.parser
        for sign in signs
        if (not sign.types or model_type in sign.types) and all(word in text for word in sign.words)
    )
    return next(fits, None)


def detected(name: str, engine: dict[str, Any]) -> Parsers:
    """The parsers of a checkpoint (a folder or a hub name). engine: vLLM's arguments, for revision and template."""
    revision = engine.get("revision")
    config = json.loads(_file(name, "config.json", revision) or "{}")
    own = engine.get("chat_template")
    return parsers_of(config.get("model_type", ""), _text(own) if own else _template(name, revision))


def _text(template: str) -> str:
    """The template; vLLM's argument is a path or the template itself."""
    return template if "{" in template or not Path(template).is_file() else Path(template).read_text(encoding="utf-8")


def _template(name: str, revision: str | None) -> str:
    alone = _file(name, "chat_template.jinja", revision)
    if alone:
        return alone
    written: Any = json.loads(_file(name, "tokenizer_config.json", revision) or "{}").get("chat_template") or ""
    if isinstance(written, list):  # several named templates
        written = "\n".join(one["template"] for one in sorted(written, key=lambda one: one["name"] == "default"))
    return str(written)


def _file(name: str, file: str, revision: str | None) -> str | None:
    """The text of a checkpoint's file, or None if there is no such file."""
    from transformers.utils.hub import cached_file

    path = cached_file(
        name,
        file,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(path).read_text(encoding="utf-8") if path else None
