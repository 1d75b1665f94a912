"""The glossary explains the terms of NeMo RL, NeMo Gym, SkyRL, SGLang and Agent-Tunix."""

import re

import pytest
from paths import ROOT

TERMS = """
accuracy; action; activation; actor; adamw; adapter; advantage; agent; agentic workflow; alignment; attention mask;
backward pass; baseline; batch; batch size; beam search; benchmark; beta; bf16; bias; bias-variance; broadcast; chat completions;
checkpoint; clipping; cluster; colocated; computation graph; config; context; context length; controller; convergence;
credit assignment; critic; cross-entropy; curriculum; dapo; data parallel; decoding; demonstration; divergence; dpo; dropout;
dynamic sampling; embedding; entropy; environment; epoch; epsilon; evaluation; expert parallel; fine-tuning; flashattention;
flashinfer; forward pass; fsdp; function calling; gae; generation; global config; gpu memory; gradient accumulation; gradient checkpointing; gradient descent;
group; grpo; hallucination; hyperparameter; importance sampling; inference; input ids; interpolation; ipc; jax; judge; kl divergence;
kv cache; lag; layer; learning rate; llm-as-a-judge; logits; log; lora; loss function; mask; megatron; mem_fraction_static; mesh; metric;
micro-batch; mini-batch; model; momentum; multi-run; multi-step; multi-turn; nccl; nucleus sampling; off-policy; offline; offload; on-policy;
online; optimizer; orchestration; override; packing; padding; parameter sharing; pass@k; perplexity; pipeline parallel; policy; ppo;
preference; prefix cach; prompt; prompt engineering; pruning; quantisation; radix cache; rank; ratio; ray; recall; reference; regularisation;
replica; responses api; reward; reward shaping; reward signal; rloo; rollout; rollout batch; sampling; sandbox; seed; sequence parallel; session;
sft; sglang; sharding; skip_tokenizer_init; sleep; slurm; softmax; staleness; step; supervised fine-tuning; task; temperature; tensor parallel; token;
tool; top_k; top_p; trace; training back end; training environment; trajectory; tokenisation; trust region; value function; verifier; vllm; w&b; warm-up; weight decay;
weight sync; weights; worker; worker group; yaml; zero
"""


@pytest.mark.parametrize("term", [term.strip() for term in re.split(r"[;\n]", TERMS) if term.strip()])
def test_the_glossary_has_the_term(term: str) -> None:
    assert term in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").casefold()


def test_its_rows_are_in_order_and_name_nothing_twice() -> None:
    rows = re.findall(r"^\| \[?([^\]|]+)", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    names = [row.strip().casefold() for row in rows][2:]  # without the head
    assert names == sorted(names) and len(names) == len(set(names))
