"""Translates the service's options to vLLM's arguments, which vLLM's own parser checks.

The parsers of tool calls and reasoning are detected from a model's type and chat template. The template shows the form
of tool calls better than the type: Qwen3 and Qwen3-Coder have the same type, but different tool calls. Reasoning is
detected where the template begins an answer, so that the whole answer of an Instruct model of a reasoning family is not
parsed as a thought.
"""

from __future__ import annotations

import argparse
import json
import logging
import secrets
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from ngym.did_you_mean import did_you_mean
from ngym.errors import ConfigError

from ..options import Options
from .environment import Model

log = logging.getLogger("ngym.models.vllm")

AUTO = "auto"

# processed: the logprobs are those of the sampling distribution, at any temperature and top-p.
# generation_config vllm: a request without `temperature` means 1.0; a checkpoint's top-k would change the policy.
# use_tqdm_on_load: each push would print a progress bar.
# allowed_media_domains: vLLM would fetch any URL that a row or a client names, also of this network. An empty list allows
# all, so this is a name that never exists (RFC 6761); data: URLs need no domain.
DEFAULTS: dict[str, Any] = {
    "logprobs_mode": "processed_logprobs",
    "generation_config": "vllm",
    "enable_prompt_tokens_details": True,
    "use_tqdm_on_load": False,
    "allowed_media_domains": ["only-data-urls.invalid"],
}
# Eager with explicit KV memory skips the compilation and the warm-up run; float32 makes the logprobs exact to 1e-5.
CPU_DEFAULTS: dict[str, Any] = {"enforce_eager": True, "enable_chunked_prefill": False, "dtype": "float32"}

OWN_OPTIONS = {
    "model": "model",
    "model_tag": "model",
    "served_model_name": "served_name",
    "tool_call_parser": "tool_call_parser",
    "enable_auto_tool_choice": "tool_call_parser",
    "reasoning_parser": "reasoning_parser",
}
GPU_TRANSFERS = ("nccl", "ipc", "sparse_nccl", "nccl_m2n", "sharded_rdt", "modelexpress")
ADAPTERS = ("enable_lora", "lora_modules", "max_lora_rank", "max_loras", "max_cpu_loras")
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM has kernels
UNSUPPORTED = ("config", "help", "api_server_count", "headless", "tool_server")
SEVERAL_MACHINES = ("nnodes", "node_rank", "master_addr", "master_port")
SERVERS = (  # of vLLM's HTTP server, which ours replaces
    "allow_credentials", "allowed_headers", "allowed_methods", "allowed_origins", "disable_access_log_for_endpoints",
    "disable_uvicorn_access_log", "enable_request_id_headers", "grpc_port", "host", "middleware", "port", "root_path",
    "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "uds", "uvicorn_log_level",
)  # fmt: skip


def parse_arguments(service: str, options: Options, model: Model, *, on_cpu: bool) -> argparse.Namespace:
    """vLLM's arguments for this service. Raises ConfigError (one line) for a name or value unknown to vLLM."""
    parser = make_arg_parser(_Parser(prog=f"service {service!r}: engine"))
    # A random seed: replicas with the same seed would give a group of rollouts the same answers. The nodes of one replica
    # have the same: each samples for itself, and other tokens there would make the logprobs wrong by nats.
    values = (
        DEFAULTS
        | {"seed": options.node.seed if options.node else secrets.randbelow(2**31)}
        | (CPU_DEFAULTS if on_cpu else {})
        | ({"kv_cache_memory_bytes": options.kv_cache_mb << 20} if on_cpu and options.kv_cache_mb else {})
    )
    known = {_name(flag): action for action in parser._actions for flag in action.option_strings}
    for key, value in options.engine.items():
        name = _name(key)
        _refuse_unsupported(service, key, name, known)
        if options.lora_rank is not None and name in ADAPTERS:
            wrong = "with lora_rank, all requests use the pushed adapter; remove one of the two"
            raise ConfigError(f"service {service!r}: engine.{key}: {wrong}")
        if name.startswith("no_") and name[3:] in known and isinstance(value, bool):
            name, value = name[3:], not value
        values[name] = value
    if on_cpu and values["enable_chunked_prefill"]:
        # A partial prefill rewinds the generator's offset, which a CPU generator does not have: the engine would die.
        wrong = "on a CPU, a request with a seed ends vLLM's engine process; remove it"
        raise ConfigError(f"service {service!r}: engine.enable_chunked_prefill: {wrong}")
    if on_cpu:
        values.pop("enable_sleep_mode", None)  # vLLM refuses it on a CPU, where sleep is only a pause
    if on_cpu and "worker_extension_cls" in values:
        wrong = "on a CPU, the weight push uses its own extension; remove it"
        raise ConfigError(f"service {service!r}: engine.worker_extension_cls: {wrong}")
    if options.node is not None:
        values |= options.node.arguments
    values |= {"model": model.name, "served_model_name": options.served_name or service}
    tools, reasoning = _parsers(service, options, model)
    if tools:
        values |= {"tool_call_parser": tools, "enable_auto_tool_choice": True}
    if options.lora_rank is not None:
        rank = next(rank for rank in ADAPTER_RANKS if rank >= options.lora_rank)
        values |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    if reasoning:
        values["reasoning_parser"] = reasoning
    words = [word for name, value in values.items() for word in _words(known[name], name, value)]
    arguments = _parse(service, parser, words)
    if options.node is not None and arguments.data_parallel_size > 1:
        wrong = "with `nodes`, data is not parallel; remove it, and raise `replicas`"
        raise ConfigError(f"service {service!r}: engine.data_parallel_size: {wrong}")
    backend = transfer_backend(arguments)
    if on_cpu and backend in GPU_TRANSFERS:
        wrong = f"{backend} moves weights between GPUs, and this vLLM runs on a CPU; remove it, and push over http"
        raise ConfigError(f"service {service!r}: engine.weight_transfer_config: {wrong}")
    if on_cpu and arguments.enable_return_routed_experts:
        wrong = "vLLM records experts on a GPU only; remove it, or serve the model with models/transformers"
        raise ConfigError(f"service {service!r}: engine.enable_return_routed_experts: {wrong}")
    return arguments


def _parsers(service: str, options: Options, model: Model) -> Parsers:
    configured = Parsers(options.tool_call_parser, options.reasoning_parser)
    if AUTO not in configured:
        return configured
    try:
        detected_parsers = detect_parsers(model.name, options.engine)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:600]
        hub = "" if model.local else "no such folder relative to the config file; as a name on the hub: "
        raise ConfigError(f"service {service!r}: model {options.model!r}: {hub}{reason}") from error
    parsers = Parsers(
        *(there if name == AUTO else name for name, there in zip(configured, detected_parsers, strict=True))
    )
    log.info("parsers: of tool calls %s, of reasoning %s", parsers.tools, parsers.reasoning)
    return parsers


def transfer_backend(arguments: argparse.Namespace) -> str | None:
    """The configured backend of vLLM's weight transfer, or None."""
    config = arguments.weight_transfer_config
    return config.backend if config is not None else None


class _Parser(FlexibleArgumentParser):
    """vLLM's parser with one-line errors instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {' '.join(message.split())}")


def _parse(service: str, parser: FlexibleArgumentParser, words: list[str]) -> argparse.Namespace:
    try:
        arguments: argparse.Namespace = parser.parse_args(words)
        validate_parsed_serve_args(arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"service {service!r}: engine: {error}") from error
    if arguments.tool_parser_plugin:
        ToolParserManager.import_tool_parser(arguments.tool_parser_plugin)
    if arguments.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(arguments.reasoning_parser_plugin)
    _check_parser(service, "tool_call_parser", arguments.tool_call_parser, ToolParserManager.list_registered())
    _check_parser(service, "reasoning_parser", arguments.reasoning_parser, ReasoningParserManager.list_registered())
    return arguments


def _check_parser(service: str, option: str, name: str | None, known: list[str]) -> None:
    if name and name not in known:
        raise ConfigError(f"service {service!r}: {option}: vLLM has no parser {name!r}{did_you_mean(name, known)}")


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _refuse_unsupported(service: str, key: str, name: str, known: dict[str, argparse.Action]) -> None:
    where = f"service {service!r}: engine.{key}"
    if name in OWN_OPTIONS:
        raise ConfigError(f"{where}: this is the service's own option {OWN_OPTIONS[name]!r}; set it there")
    if name in UNSUPPORTED or name in SERVERS:
        raise ConfigError(f"{where}: ngym decides this itself; remove it")
    if name in SEVERAL_MACHINES:
        raise ConfigError(f"{where}: ngym decides this itself; remove it, and give the stanza `nodes`")
    if name not in known:
        raise ConfigError(f"{where}: vLLM has no argument {key!r}{did_you_mean(name, list(known))}")


def _words(action: argparse.Action, name: str, value: Any) -> list[str]:
    """One argument as command-line words."""
    flag = "--" + name.replace("_", "-")
    if value is None:
        return []
    if action.nargs == 0:
        off = "--no-" + name.replace("_", "-")
        return [flag] if value else [off] if off in action.option_strings else []
    if isinstance(value, list) and action.nargs in ("+", "*"):
        return [flag, *map(str, value)]
    if isinstance(value, dict | list):
        return [f"{flag}={json.dumps(value)}"]
    return [f"{flag}={value}"]


# --- parsers of tool calls and reasoning


class Parsers(NamedTuple):
    tools: str | None
    reasoning: str | None


class ParserSignature(NamedTuple):
    """A parser and its conditions: the model has one of `types` (if any), and the text has all of `words`."""

    parser: str
    types: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


DEEPSEEK_CALLS = "<\uff5ctool\u2581call\u2581begin\uff5c>"
TOOLS = (  # the first match wins
    ParserSignature("openai", types=("gpt_oss",)),
    ParserSignature("llama4_pythonic", types=("llama4", "llama4_text")),
    ParserSignature("kimi_k2", words=("<|tool_calls_section_begin|>",)),
    ParserSignature("minimax_m2", words=("<minimax:tool_call>",)),
    ParserSignature("seed_oss", words=("<seed:tool_call>",)),
    ParserSignature("functiongemma", words=("<start_function_call>",)),
    ParserSignature("gemma4", types=("gemma4", "gemma4_text", "gemma4_unified")),
    ParserSignature("deepseek_v3", words=(DEEPSEEK_CALLS, "```json")),
    ParserSignature("deepseek_v31", words=(DEEPSEEK_CALLS,)),
    ParserSignature("mistral", words=("[TOOL_CALLS]",)),
    ParserSignature("glm45", words=("<tool_call>", "<arg_key>")),
    ParserSignature("qwen3_coder", words=("<tool_call>", "<function=")),
    ParserSignature("hermes", words=("<tool_call>", "arguments")),
    ParserSignature("granite4", types=("granitemoehybrid",), words=("tool_call",)),
    ParserSignature("granite", types=("granite", "granitemoe"), words=("<|tool_call|>",)),
    ParserSignature("phi4_mini_json", types=("phi3",), words=("<|tool|>",)),
    ParserSignature("llama3_json", types=("llama",), words=("ipython",)),
    ParserSignature("jamba", words=("<tool_calls>",)),
)
REASONING = (  # words: after `add_generation_prompt`
    ParserSignature("openai_gptoss", types=("gpt_oss",)),
    ParserSignature("gemma4", types=("gemma4", "gemma4_text", "gemma4_unified")),
    ParserSignature("mistral", types=("mistral", "mistral3", "ministral3"), words=("[THINK]",)),
    ParserSignature("glm45", types=("glm4_moe",), words=("<think>",)),
    ParserSignature("minimax_m2", types=("minimax_m2",), words=("<think>",)),
    ParserSignature("seed_oss", types=("seed_oss",), words=("think>",)),
    ParserSignature("deepseek_v3", types=("deepseek_v3", "deepseek_v32"), words=("<think>", "thinking")),
    ParserSignature("deepseek_r1", types=("deepseek_v3", "llama"), words=("<think>",)),
    ParserSignature(
        "qwen3", types=("qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"), words=("<think>",)
    ),
)
BEGINS_AN_ANSWER = "add_generation_prompt"


def parsers_of(model_type: str, template: str) -> Parsers:
    """Each is None if no parser matches: the template has no tool calls, or does not begin a thought."""
    beginning = template.rpartition(BEGINS_AN_ANSWER)[2]
    return Parsers(_first(TOOLS, model_type, template), _first(REASONING, model_type, beginning))


def _first(signs: tuple[ParserSignature, ...], model_type: str, text: str) -> str | None:
    fits = (
        sign.parser
        for sign in signs
        if (not sign.types or model_type in sign.types) and all(word in text for word in sign.words)
    )
    return next(fits, None)


def detect_parsers(name: str, engine: dict[str, Any]) -> Parsers:
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
