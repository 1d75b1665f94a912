"""Imports without torch's compiler: what is left out is imported when it is used."""

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
    from ngym.trainer.model.lora import add_adapter
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

LEFT_OUT = """
import sys
import torch
from ngym.runtime.lean_imports import has_compiler, leave_out_compiler
leave_out_compiler()
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
import torch._inductor.pattern_matcher as matcher
from torch._inductor.custom_graph_pass import CustomGraphPass
try:
    from torch._inductor import lowering
except ImportError:
    pass
else:
    raise AssertionError("vLLM would change it")
class Pass(CustomGraphPass):
    def uuid(self):
        return 1
assert Pass().uuid() == 1
@torch.compile(dynamic=True)
def double(x):
    return 2 * x
assert torch.compile(double) is double and double(torch.ones(1)) == 2 and not has_compiler()
assert isinstance(matcher.PatternMatcherPass(), sys.modules["torch._inductor.pattern_matcher"].PatternMatcherPass)
from torch._inductor import lowering
assert lowering.lowerings and has_compiler()
"""
IMPORTED = """
import torch._dynamo
from ngym.runtime.lean_imports import has_compiler, leave_out_compiler
compile = torch.compile
leave_out_compiler()
assert torch.compile is compile and has_compiler()
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "script",
    [LOADED, PLACEHOLDERS, LORA, DEFERRED, LEFT_OUT, IMPORTED],
    ids=["loaded", "placeholders", "lora", "deferred", "left out", "imported"],
)
def test_what_is_left_out_is_imported_when_it_is_used(script: str, tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.process
def test_transformers_finds_the_same_names_in_its_modules() -> None:
    script = """
import sys
from contextlib import nullcontext
from pathlib import Path
from ngym.runtime.lean_imports import quick_metadata
with quick_metadata() if sys.argv[1] == "quick" else nullcontext():
    import transformers.models
from transformers.utils.import_utils import define_import_structure, fetch__all__
assert (fetch__all__.__module__ == "transformers.utils.import_utils") is (sys.argv[1] != "quick")
found = define_import_structure(Path(transformers.__file__).parent / "models", prefix="models")
print(sorted((sorted(key), sorted((name, sorted(names)) for name, names in value.items())) for key, value in found.items()))
"""
    quick, plain = (subprocess.check_output([sys.executable, "-c", script, how]) for how in ("quick", "plain"))
    assert quick == plain and len(plain) > 100_000


def test_the_distributions_of_packages_are_those_of_the_standard_library() -> None:
    expected = {package: set(names) for package, names in metadata.packages_distributions().items()}
    found = {package: set(names) for package, names in packages_distributions().items()}
    assert {"torch", "transformers", "yaml"} <= found.keys()
    if sys.version_info < (3, 12):
        assert found == expected
    else:  # which also lists folders without Python
        assert all(names <= expected[package] for package, names in found.items())
