"""Imports without the compiler: what is left out is imported when it is used, and the same afterwards."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from ngym.runtime.lean_imports import packages_distributions

LOADED = """
import sys
import torch
from ngym.runtime.lean_imports import lean_imports
with lean_imports():
    from transformers import AutoModelForCausalLM, Qwen3Config
    shape = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**shape, num_key_value_heads=2, head_dim=16))
    model.save_pretrained(sys.argv[1])
    again = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.tensor([[1, 2, 3]])
assert torch.equal(model(input_ids=ids).logits, again(input_ids=ids).logits)
left_out = {"torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._inductor"}
assert not left_out & sys.modules.keys(), left_out & sys.modules.keys()
compiled = torch.compile(lambda x: x + 1, backend="eager")
assert compiled(torch.ones(2)).tolist() == [2, 2]
from torch._dynamo import config
import torch._dynamo.config as same
assert config is same
"""
PLACEHOLDERS = """
import sys
import torch
from ngym.runtime.lean_imports import lean_imports
with lean_imports():
    from torch.distributed.tensor import DTensor
    assert not isinstance(torch.ones(1), DTensor)
    import torch._dynamo.config
    import torch._dynamo
    assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
    assert "torch.distributed.tensor" in sys.modules
    from torch.distributed.tensor.placement_types import Shard
    assert Shard(1).dim == 1
    class Own(DTensor):
        pass
from torch.distributed import tensor
assert issubclass(Own, tensor.DTensor) and issubclass(tensor.DTensor, DTensor)
"""
LORA = """
import sys
import torch
from ngym.runtime.lean_imports import lean_imports
with lean_imports():
    from transformers import AutoModelForCausalLM, Qwen3Config
    from ngym.trainer.model.policy import add_adapter
    from ngym.trainer.recipe.recipe import LoraOptions
    shape = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**shape, num_key_value_heads=2, head_dim=16))
    add_adapter(model, LoraOptions(rank=2))
assert any("lora_A" in name for name, _ in model.named_parameters())
assert "torch.distributed.tensor" not in sys.modules and "tensor" not in vars(torch.distributed)
from torch.distributed.tensor import DTensor
assert torch.distributed.tensor.DTensor is DTensor
"""
DEFERRED = """
import sys
from ngym.runtime.lean_imports import defer_compiler, lean_imports
defer_compiler()
with lean_imports():
    import torch
linear = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(linear.parameters())
linear(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
assert "torch._dynamo.eval_frame" not in sys.modules
torch._dynamo.config.cache_size_limit = 3
import torch._dynamo
assert torch._dynamo.eval_frame is sys.modules["torch._dynamo.eval_frame"]
assert torch._dynamo.config.cache_size_limit == 3
assert torch.compile(linear, backend="eager")(torch.ones(1, 2)).shape == (1, 1)
optimizer.step()
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "script", [LOADED, PLACEHOLDERS, LORA, DEFERRED], ids=["loaded", "placeholders", "lora", "deferred"]
)
def test_what_is_left_out_is_imported_when_it_is_used(script: str, tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_distributions_of_packages_are_those_of_the_standard_library() -> None:
    expected = {package: set(names) for package, names in metadata.packages_distributions().items()}
    found = {package: set(names) for package, names in packages_distributions().items()}
    assert {"torch", "transformers", "yaml"} <= found.keys()
    if sys.version_info < (3, 12):
        assert found == expected
    else:  # which also lists folders without Python
        assert all(names <= expected[package] for package, names in found.items())
