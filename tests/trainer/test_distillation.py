"""On-policy distillation: advantages, a live run that approaches its teacher, and teachers that are refused."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stub_policy import Stub, serving
from trainer_service import arguments, metrics_of, new_policy, train
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from ngym.errors import ConfigError, UsageError
from ngym.trainer import loop
from ngym.trainer.algorithms import Setup, policy_gradient, teacher
from ngym.trainer.data import samples
from ngym.trainer.engine import engine
from ngym.trainer.engine.engine import score
from ngym.trainer.model import packing, teacher_divergence
from ngym.trainer.model import policy as model
from ngym.trainer.recipe import algorithms, objective, recipe, recipe_reader

pytestmark = pytest.mark.usefixtures("only_rank")
Change = Callable[[list[Any], list[int]], list[Any]]


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")


@pytest.fixture(scope="module")
def student(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_policy(root, tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def master(student: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher that is sure where the student is not: reverse KL about 1.5."""
    network = AutoModelForCausalLM.from_pretrained(student)
    folder = tmp_path_factory.mktemp("master")
    with torch.no_grad():
        network.lm_head.weight = torch.nn.Parameter(network.lm_head.weight.clone())
        network.config.tie_word_embeddings = False
        network.lm_head.weight[512:] *= 0.1
        network.lm_head.weight[:512] *= 5
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(student).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def setup(student: Path, tokenizer: PreTrainedTokenizerBase) -> Setup:
    policy = model.load_policy(recipe.ModelOptions(path=str(student)), tokenizer, 0).eval()
    launch, optimizing = recipe.Launch(0, 0, 1), recipe.OptimizerOptions(lr=1e-3)
    learner = engine.Engine(policy, launch, recipe.EngineOptions(zero_stage=0), optimizing)
    words = [
        f"model.path={student}",
        "evaluation=null",
        f"algorithm.teacher.path={student}",
        "algorithm.teacher.beta=null",
    ]
    return Setup(recipe_reader.read_recipe(["distillation.yaml"], words)[0], learner, tokenizer)


def rollout(reward: float, group: str, *spans: list[tuple[int, int]]) -> Any:
    segments = tuple(
        samples.SampledSegment(list(range(20, 22 + each[-1][1])), each, sampler=[-1.0] * sum(b - a for a, b in each))
        for each in spans
    )
    fields = {"components": {}, "truncated": False, "turns": 1, "tool_calls": 0, "tool_errors": 0}
    return samples.RolloutSample(segments=segments, group=group, reward=reward, **fields)


@pytest.mark.parametrize(("coef", "reward_coef"), [(1.0, 0.0), (0.5, 2.0)])
def test_a_tokens_advantage_is_the_teachers_logprob_minus_the_samplers_plus_that_of_the_reward(
    setup: Setup, master: Path, coef: float, reward_coef: float
) -> None:
    options = algorithms.DistillationOptions.model_validate(
        {"teacher": {"path": str(master), "coef": coef, "reward_coef": reward_coef}}
    )
    assert options.teacher is not None
    scored = teacher.open_teachers(setup, options.teacher, 1.0)
    rollouts = [
        rollout(1.0, "a", [(4, 9)], [(3, 5), (7, 8)]),
        rollout(0.0, "a", [(6, 11)]),
        rollout(0.5, "b", [(2, 4)]),
    ]
    algorithm = policy_gradient.PolicyGradient(options, 1, None, scored)
    prepared: Any = algorithm.prepare(rollouts, setup.engine, 15)
    network = AutoModelForCausalLM.from_pretrained(master)
    gaps, of_rewards, found = [], [], []
    for sample, of_reward in zip(prepared, (0.5, -0.5, 0.0), strict=True):
        for segment in sample.segments:
            ids = torch.tensor([segment.token_ids])
            with torch.no_grad():
                log_p = network(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            gaps += [float(log_p[at - 1]) + 1 for a, b in segment.spans for at in range(a, b)]
            of_rewards += [of_reward] * segment.trained
            found += segment.advantages
    expected = [coef * gap + reward_coef * reward for gap, reward in zip(gaps, of_rewards, strict=True)]
    assert found == pytest.approx(expected, abs=1e-4)


def test_the_exact_reverse_kl_falls(
    setup: Setup, master: Path, student: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    policy = model.load_policy(recipe.ModelOptions(path=str(student)), tokenizer, 0).eval()
    optimizing = recipe.OptimizerOptions(lr=1e-2)
    learner = engine.Engine(policy, recipe.Launch(0, 0, 1), recipe.EngineOptions(zero_stage=0), optimizing)
    scored = teacher.open_teacher(setup, objective.Teacher(path=str(master)), 1.0)
    options = algorithms.DistillationOptions(teacher=objective.Teacher(path=str(master)))
    assert options.teacher is not None
    algorithm = policy_gradient.PolicyGradient(options, 1, None, teacher.open_teachers(setup, options.teacher, 1.0))
    prompts = [[random.Random(n).randrange(20, 1000) for _ in range(4)] for n in range(4)]
    every_token = [one_token_rollout(prompt, token, -1.0) for prompt in prompts for token in range(1024)]
    of_teacher = score(every_token, scored.logprobs, learner, 8192)
    teacher_PV = torch.tensor(of_teacher).reshape(4, 1024)
    kls = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        log_p_PV = torch.tensor(score(every_token, learner.logprobs, learner, 8192)).reshape(4, 1024)
        kls.append(float((log_p_PV.exp() * (log_p_PV - teacher_PV)).sum(-1).mean()))
        drawn_PS = torch.multinomial(log_p_PV.exp(), 128, replacement=True, generator=generator).tolist()
        rollouts = [
            one_token_rollout(prompt, token, float(log_p_PV[place, token]))
            for place, prompt in enumerate(prompts)
            for token in drawn_PS[place]
        ]
        loop.take_step(learner, algorithm, algorithm.prepare(rollouts, learner, 8192), 8192, 1.0)
    assert kls[0] > 2 and kls[-1] < 0.4 * kls[0], kls


def one_token_rollout(prompt: list[int], token: int, logprob: float) -> Any:
    """A rollout of one sampled token."""
    segment = samples.SampledSegment([*prompt, token], [(4, 5)], sampler=[logprob])
    fields = {"components": {}, "truncated": False, "turns": 1, "tool_calls": 0, "tool_errors": 0}
    return samples.RolloutSample(segments=(segment,), group=str(prompt), reward=0.0, **fields)


# --- a teacher behind a URL ------------------------------------------------------------------------------------------


@contextmanager
def serve_teacher(
    folder: Path,
    change: Change = lambda logprobs, ids: logprobs,
    tokens: Callable[[list[int]], list[int]] = list,
    problems: Iterable[int | type[Exception] | None] = (),
    context: int | None = None,
    limit: int | None = None,
) -> Iterator[tuple[str, list[int]]]:
    """vLLM's two routes over a network in this folder; `change` alters its prompt_logprobs. Yields url and calls.

    problems: of the first requests in turn: a status, an exception after which the connection is closed, or none.
    context: as /tokenize returns it. limit: tokens from which a prompt is refused, in vLLM's words.
    """
    ahead = iter(problems)
    network, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    calls: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            problem = next(ahead, None)
            if isinstance(problem, int):
                return self.send_error(problem)
            if problem is not None:
                return None
            if self.path == "/tokenize":
                ids = tokens(tokenizer(request["prompt"], add_special_tokens=False)["input_ids"])
                answer: Any = {"tokens": ids, "max_model_len": context}
            else:
                ids = request["token_ids"]
                calls.append(len(ids))
                if limit is not None and len(ids) >= limit:
                    return self.refuse(
                        f"The decoder prompt (length {len(ids)}) is longer than the maximum model length"
                    )
                with torch.no_grad():
                    log_p = network(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
                top_k = request["sampling_params"]["prompt_logprobs"]
                logprobs: list[Any] = [None]
                for at in range(1, len(ids)):
                    likeliest = log_p[at - 1].topk(top_k).indices.tolist()
                    logprobs.append({str(n): {"logprob": float(log_p[at - 1, n])} for n in {ids[at], *likeliest}})
                answer = {"choices": [], "prompt_logprobs": change(logprobs, ids)}
            self.answer(200, answer)

        def refuse(self, message: str) -> None:
            self.answer(400, {"error": {"message": message, "type": "BadRequestError", "code": 400}})

        def answer(self, status: int, answer: Any) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # all calls of a micro-batch come at once

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", calls
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_scores_as_the_checkpoint_that_it_serves(setup: Setup, master: Path) -> None:
    packed = packing.pack(
        [rollout(1.0, "a", [(4, 9)], [(3, 5), (7, 8)]), rollout(0.0, "a", [(6, 11)])], setup.engine.device
    )
    local = teacher.open_teacher(setup, objective.Teacher(path=str(master)), 1.0)
    with serve_teacher(master) as (url, calls):
        remote = teacher.open_teacher(setup, objective.Teacher(url=url), 1.0)
        before = len(calls)
        for _ in range(2):  # the second time, the answers are kept
            torch.testing.assert_close(remote.logprobs(packed), local.logprobs(packed), atol=1e-4, rtol=0)
            assert len(calls) == before + 3  # a call for each segment


ROLLOUTS = (((4, 9),), ((3, 5), (7, 8)), ((6, 11),))


def reference_divergence(ours: torch.Tensor, teacher_logits: torch.Tensor, beta: float) -> torch.Tensor:
    """From probabilities, [N, V] -> [N]."""
    p, q = teacher_logits.softmax(-1), ours.softmax(-1)
    if beta in (0.0, 1.0):
        p, q = (p, q) if beta == 0 else (q, p)
        return (p * (p / q).log()).sum(-1)
    m = beta * p + (1 - beta) * q
    return beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)


def logits_of(network: Any, segments: Any) -> torch.Tensor:
    """Of the trained tokens, one segment after the other."""
    found = []
    for segment in segments:
        logits = network(input_ids=torch.tensor([segment.token_ids])).logits[0]
        found += [logits[at - 1] for start, end in segment.spans for at in range(start, end)]
    return torch.stack(found)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk", [1 << 30, 4 * 1024 * 2])
def test_a_divergence_and_its_gradient_are_those_of_whole_distributions(
    setup: Setup, student: Path, master: Path, tokenizer: PreTrainedTokenizerBase, beta: float, chunk: int
) -> None:
    policy = model.load_policy(recipe.ModelOptions(path=str(student)), tokenizer, 0).eval()
    policy.logits_bytes = chunk  # all tokens at once, or two
    options = algorithms.DistillationOptions.model_validate(
        {"teacher": {"path": str(master), "beta": beta, "coef": 0.5}, "loss": {"anchor": "sampler"}}
    )
    assert options.teacher is not None
    algorithm = policy_gradient.PolicyGradient(options, 1, None, teacher.open_teachers(setup, options.teacher, 1.0))
    batch: Any = algorithm.prepare([rollout(1.0, str(at), list(each)) for at, each in enumerate(ROLLOUTS)],
                                   setup.engine, 8192)  # fmt: skip
    assert all(value == 0 for sample in batch for segment in sample.segments for value in segment.advantages)
    packed = packing.pack(batch, setup.engine.device)
    step = algorithm.step_loss(batch)
    loss = step.loss(policy(packed, algorithm.asks), packed)
    (loss.sum / step.divisor).backward()
    found = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}
    assert loss.metrics["teacher_divergence"].count == step.divisor == 13

    network = AutoModelForCausalLM.from_pretrained(student)
    with torch.no_grad():
        teacher_logits = logits_of(AutoModelForCausalLM.from_pretrained(master), packed.segments)
    expected = reference_divergence(logits_of(network, packed.segments), teacher_logits, beta).sum()
    (0.5 * expected / 13).backward()
    assert loss.metrics["teacher_divergence"].total == pytest.approx(expected.item(), rel=1e-4)
    assert loss.metrics["loss"].total == pytest.approx(0.5 * expected.item(), rel=1e-4)
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(found[f"network.{name}"], parameter.grad, atol=1e-5, rtol=1e-3)


def test_a_server_is_compared_on_its_likeliest_tokens_and_all_others_together(setup: Setup, master: Path) -> None:
    packed = packing.pack([rollout(1.0, str(at), list(each)) for at, each in enumerate(ROLLOUTS)], setup.engine.device)
    network = AutoModelForCausalLM.from_pretrained(master)
    with serve_teacher(master) as (url, _):
        remote = teacher.open_teacher(setup, objective.Teacher(url=url), 1.0, top_k=5)
        logprobs_NK, token_ids_NK = remote.distributions(packed).rows(0, 13)
    with torch.no_grad():
        expected = logits_of(network, packed.segments).log_softmax(-1).topk(5)
    torch.testing.assert_close(logprobs_NK, expected.values, atol=1e-4, rtol=0)
    assert token_ids_NK is not None and torch.equal(token_ids_NK, expected.indices)


def test_a_call_that_a_server_drops_or_is_too_busy_for_is_made_again(
    setup: Setup, master: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(teacher.time, "sleep", pauses.append)
    packed = packing.pack([rollout(1.0, "a", list(ROLLOUTS[0]))], setup.engine.device)
    problems = [None, 503, ConnectionResetError, None, 400]
    with serve_teacher(master, problems=problems) as (url, calls):
        remote = teacher.Server(url, None, None)
        first, second = remote.logprobs(packed), (remote.ask_again(), remote.logprobs(packed))[1]
        assert torch.equal(first, second) and len(calls) == 2 and pauses == list(teacher.PAUSES_S[:2])
        remote.ask_again()
        with pytest.raises(UsageError, match="answered 400"):
            remote.logprobs(packed)


def test_a_server_that_restarts_is_awaited_if_it_has_answered_before(
    setup: Setup, master: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(teacher.time, "sleep", pauses.append)
    packed = packing.pack([rollout(1.0, "a", list(ROLLOUTS[0]))], setup.engine.device)
    restart = [500, *[ConnectionResetError] * 8]
    with serve_teacher(master, problems=[None, *restart]) as (url, calls):
        remote = teacher.Server(url, None, None)
        first, second = remote.logprobs(packed), (remote.ask_again(), remote.logprobs(packed))[1]
        assert torch.equal(first, second) and len(calls) == 2
        assert pauses == [*teacher.PAUSES_S, *teacher.RESTART_PAUSES_S[:5]]
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"ng_train: the teacher {url} does not answer (") and "waiting up to 300 s" in line
    with serve_teacher(master, problems=restart) as (url, _), pytest.raises(UsageError, match="cannot be used"):
        teacher.Server(url, None, None).logprobs(packed)


def test_a_server_that_hangs_is_not_awaited_as_one_that_restarts(
    setup: Setup, master: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count(0.0, 600.0)  # each attempt takes its whole time
    monkeypatch.setattr(teacher, "time", SimpleNamespace(sleep=lambda pause_s: None, monotonic=lambda: next(clock)))
    packed = packing.pack([rollout(1.0, "a", list(ROLLOUTS[0]))], setup.engine.device)
    problems = iter([None, *[ConnectionResetError] * 9])
    with serve_teacher(master, problems=problems) as (url, _):
        remote = teacher.Server(url, None, None)
        remote.logprobs(packed)
        remote.ask_again()
        with pytest.raises(teacher.TeacherGone, match="cannot be used"):  # not a mistake of the recipe
            remote.logprobs(packed)
    assert len(list(problems)) == 9 - len(teacher.PAUSES_S) - 1


def test_the_divergence_on_the_likeliest_tokens_is_that_of_merged_outcomes() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, teacher_logits = torch.randn(2, 6, 9, generator=generator, dtype=torch.float64).unbind()
    values, ids = teacher_logits.log_softmax(-1).topk(3)
    padded = torch.cat((values, torch.full((6, 2), -torch.inf)), 1), torch.cat((ids, torch.zeros(6, 2).long()), 1)
    for beta in (0.0, 0.4, 1.0):
        ours.grad = None
        found = teacher_divergence.divergence(ours.requires_grad_().log_softmax(-1), *padded, beta)
        merged = []
        for logits in (ours, teacher_logits):
            p = logits.softmax(-1).gather(1, ids)
            merged.append(torch.cat((p, 1 - p.sum(-1, keepdim=True)), 1).log())
        torch.testing.assert_close(found, reference_divergence(*merged, beta))
        full = teacher_divergence.divergence(ours.log_softmax(-1), teacher_logits.log_softmax(-1), None, beta)
        assert bool((found <= full).all())
        found.sum().backward()
        assert bool(ours.grad.isfinite().all())


@pytest.mark.parametrize("source", ["path", "url"])
def test_a_live_run_lowers_a_divergence(student: Path, master: Path, tmp_path: Path, source: str) -> None:
    with serving(Stub(student, equal_share=8)) as stub, serve_teacher(master) as (url, _):
        words = [*arguments(tmp_path, student, stub, 4), "evaluation=null", "algorithm.name=distillation"]
        words += [f"algorithm.teacher.{source}={url if source == 'url' else master}", "algorithm.teacher.beta=0.5"]
        output, _ = (process := train(tmp_path, [*words, "rollouts.updates_per_step=2"])).communicate(timeout=600)
        assert process.returncode == 0, output
    found = [row["teacher_divergence"] for row in metrics_of(tmp_path) if "teacher_divergence" in row]
    assert len(found) == 4 and max(found[1:]) < 0.98 * found[0]


@pytest.mark.parametrize("source", ["path", "url"])
def test_a_live_run_learns_from_its_teacher_where_no_reward_has_a_signal(
    student: Path, master: Path, tmp_path: Path, source: str
) -> None:
    with (
        serving(Stub(student, equal_share=8)) as stub,
        serve_teacher(master) as (url, calls),
    ):  # of eight: all rewards are 0.5
        words = [*arguments(tmp_path, student, stub, 2), "evaluation=null", "algorithm.name=distillation"]
        words += [f"algorithm.teacher.{source}={url if source == 'url' else master}", "rollouts.updates_per_step=1"]
        output, _ = (process := train(tmp_path, words)).communicate(timeout=600)
        assert process.returncode == 0, output
    rows = [row for row in metrics_of(tmp_path) if "teacher_kl" in row]
    assert len(rows) == 2 and all(row["teacher_kl"] > 1 and row["grad_norm"] > 0 for row in rows)
    assert all(row["teacher_tokens"] == 10 * row["global_valid_seqs"] for row in rows)
    assert bool(calls) == (source == "url")
    assert (tmp_path / "run" / "policy" / "model.safetensors").exists()


def shift(logprobs: list[Any], ids: list[int]) -> list[Any]:
    values = [one and next(iter(one.values())) for one in logprobs]
    return [None, *({str(token): value} for token, value in zip(ids[1:], [*values[2:], values[1]], strict=True))]


def wavering() -> Change:
    count = iter(range(1000))

    def change(logprobs: list[Any], ids: list[int]) -> list[Any]:
        add = float(next(count))
        return [one and {key: {"logprob": value["logprob"] - add} for key, value in one.items()} for one in logprobs]

    return change


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"tokens": lambda ids: ids[::-1]}, "another tokenizer than the policy's"),
        ({"change": lambda logprobs, ids: None}, "returned no prompt_logprobs for"),
        ({"change": lambda logprobs, ids: logprobs[:-1]}, "prompt_logprobs for"),
        ({"change": lambda logprobs, ids: [None, *({"7000": {"logprob": -1.0}} for _ in ids[1:])]}, "own tokens"),
        (
            {"change": lambda logprobs, ids: [None, *({str(i): {"logprob": 2.0}} for i in ids[1:])]},
            "not log-probabilities",
        ),
        ({"limit": 5}, "its context is too small for a known text of"),
        ({"change": wavering()}, "not deterministic: two answers for the same text differ by 1"),
        ({"change": shift}, "not aligned"),
    ],
    ids=["tokenizer", "none", "too few", "other tokens", "positive", "short", "wavering", "shifted"],
)
def test_a_faulty_server_is_refused_with_a_line(setup: Setup, master: Path, faults: Any, reason: str) -> None:
    with serve_teacher(master, **faults) as (url, _), pytest.raises(ConfigError) as caught:
        teacher.open_teacher(setup, objective.Teacher(url=url), 1.0)
    assert str(caught.value).startswith(f"algorithm.teacher.url: {url}: ") and reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_teachers_that_cannot_be_reached_or_have_another_tokenizer_are_refused(
    setup: Setup, master: Path, root: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9/tokenize cannot be used: .*refused"):
        teacher.open_teacher(setup, objective.Teacher(url="http://127.0.0.1:9"), 1.0)
    AutoModelForCausalLM.from_pretrained(master).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(root / "data" / "letters" / "tokenizer").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"another tokenizer than the policy's: its token .* has another id or none"):
        teacher.open_teacher(setup, objective.Teacher(path=str(tmp_path)), 1.0)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=f"^algorithm.teacher.path: no model can be loaded from {tmp_path}: "):
        teacher.open_teacher(setup, objective.Teacher(path=str(tmp_path)), 1.0)
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]}'
    )
    with pytest.raises(ConfigError, match=f"^algorithm.teacher.path: {tmp_path}: this model is one for sequence class"):
        teacher.open_teacher(setup, objective.Teacher(path=str(tmp_path)), 1.0)
    scored = teacher.open_teacher(setup, objective.Teacher(path=str(master)), 1.0)
    long = samples.Sample((samples.Segment([20] * 300, [(1, 300)]),))
    with pytest.raises(UsageError, match="its context is 256 tokens, and a rollout has 300"):
        scored.logprobs(packing.pack([long], setup.engine.device))


# --- several teachers, hints, the policy itself ----------------------------------------------------------------------


def logprobs_of(folder: Path, rollouts: Any) -> list[list[list[float]]]:
    """Log p of the sampled tokens, from transformers alone."""
    network = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for one in rollouts:
        found.append([])
        for segment in one.segments:
            ids = torch.tensor([segment.token_ids])
            with torch.no_grad():
                log_p = network(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            found[-1].append([float(log_p[at - 1]) for a, b in segment.spans for at in range(a, b)])
    return found


def test_several_teachers_score_by_agent_and_by_weight(setup: Setup, student: Path, master: Path) -> None:
    rollouts = [
        replace(rollout(0.0, "a", [(4, 9)], [(3, 5), (7, 8)]), agent="math"),
        replace(rollout(0.0, "b", [(6, 11)]), agent="games"),
    ]
    several = [
        {"path": str(master), "weight": 3.0, "agents": ["math"]},
        {"path": str(student), "weight": 1.0},
    ]
    options = objective.Teacher.model_validate({"several": several})
    found = teacher.open_teachers(setup, options, 1.0).scores(rollouts, setup.engine, 15)
    of_master, of_student = logprobs_of(master, rollouts), logprobs_of(student, rollouts)
    for segment, (of_teacher, ours) in enumerate(zip(of_master[0], of_student[0], strict=True)):
        mean = [(3 * a + b) / 4 for a, b in zip(of_teacher, ours, strict=True)]
        assert found[0][segment] == pytest.approx(mean, abs=1e-4)
    assert found[1][0] == pytest.approx(of_student[1][0], abs=1e-4)
    alone = objective.Teacher.model_validate({"several": several[:1]})
    with pytest.raises(UsageError, match="no teacher scores the rollouts of 'games'"):
        teacher.open_teachers(setup, alone, 1.0).scores(rollouts, setup.engine, 15)


def one_turn_rollout(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], answer: str, **fields: str
) -> Any:
    """A rollout of one turn, rendered by the policy's chat template."""
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    sampled = tokenizer.encode(answer, add_special_tokens=False)
    span = (len(ids), len(ids) + len(sampled))
    segment = samples.SampledSegment([*ids, *sampled], [span], sampler=[-1.0] * len(sampled))
    counts = {"components": {}, "truncated": False, "turns": 1, "tool_calls": 0, "tool_errors": 0}
    return samples.RolloutSample(segments=(segment,), group="a", reward=0.0, task=fields, **counts)


def test_rollouts_that_are_too_long_for_a_teacher_train_nothing(setup: Setup, master: Path) -> None:
    """The network's context is 256 tokens; a server has 16, one of which it samples."""

    def prepare(teacher_options: dict[str, Any], *lengths: int) -> list[int]:
        options = algorithms.DistillationOptions.model_validate({"teacher": teacher_options})
        assert options.teacher is not None
        teachers = teacher.open_teachers(setup, options.teacher, 1.0)
        algorithm = policy_gradient.PolicyGradient(options, 1, None, teachers)
        rollouts = [rollout(1.0, str(length), [(length - 3, length - 2)]) for length in lengths]
        found = algorithm.prepare(rollouts, setup.engine, 512)
        return [sample.longest for sample in found]

    assert prepare({"path": str(master)}, 256, 257) == [256]
    assert prepare({"path": str(master)}, 300) == []
    with serve_teacher(master, context=16) as (url, _):
        assert prepare({"url": url}, 15, 16) == [15]
    with serve_teacher(master) as (url, _):  # it does not tell its context
        assert prepare({"url": url}, 16) == [16]
    with serve_teacher(master, limit=50) as (url, _):  # nor here, and it refuses what is too long
        assert prepare({"url": url}, 49, 50, 20) == [49, 20]
        several = [{"url": url}, {"path": str(master)}]
        assert prepare({"several": several}, 50, 49) == [49]


def test_a_hint_needs_room_in_the_context(setup: Setup, tokenizer: PreTrainedTokenizerBase) -> None:
    question = {"role": "user", "content": "What is 2 + 3?"}
    sample = one_turn_rollout(tokenizer, [question], "It is 5.", expected_answer="5")
    place = setup.engine.policy.context - sample.longest
    named = {"current_policy": True, "hint": "The answer is {expected_answer}."}
    teachers = teacher.open_teachers(setup, objective.Teacher.model_validate(named), 1.0)
    [segment] = sample.segments
    longer = replace(segment, token_ids=[*segment.token_ids, *[20] * place])
    found, of_longer = teachers.scores([sample, replace(sample, segments=(longer,))], setup.engine, 8192)
    assert found is not None and of_longer is None


def test_a_hint_is_inserted_once_into_each_rollout(
    setup: Setup, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    inserted: list[str] = []
    insert = teacher.Hint.insert

    def counted(hint: teacher.Hint, rollout: samples.RolloutSample) -> samples.RolloutSample:
        inserted.append(rollout.group)
        return insert(hint, rollout)

    monkeypatch.setattr(teacher.Hint, "insert", counted)
    question = {"role": "user", "content": "What is 2 + 3?"}
    sampled = [
        replace(one_turn_rollout(tokenizer, [question], "It is 5.", expected_answer="5"), group=group)
        for group in ("a", "b")
    ]
    named = {"current_policy": True, "hint": "The answer is {expected_answer}."}
    options = algorithms.DistillationOptions.model_validate({"teacher": named})
    assert options.teacher is not None
    teachers = teacher.open_teachers(setup, options.teacher, 1.0)
    prepared = policy_gradient.PolicyGradient(options, 1, None, teachers).prepare(sampled, setup.engine, 8192)
    assert len(prepared) == 2 and inserted == ["a", "b"]


@pytest.mark.parametrize("source", ["current_policy", "path"])
def test_a_hint_is_a_message_that_only_the_teacher_sees(
    setup: Setup, student: Path, tokenizer: PreTrainedTokenizerBase, source: str
) -> None:
    question = {"role": "user", "content": "What is 2 + 3?"}
    sample = one_turn_rollout(tokenizer, [question], "It is 5.", expected_answer="5")
    named = {source: True if source == "current_policy" else str(student), "hint": "The answer is {expected_answer}."}
    teachers = teacher.open_teachers(setup, objective.Teacher.model_validate(named), 1.0)
    [[found]] = teachers.scores([sample], setup.engine, 8192)
    hinted = one_turn_rollout(tokenizer, [question, {"role": "user", "content": "The answer is 5."}], "It is 5.")
    assert hinted.segments[0].token_ids != sample.segments[0].token_ids
    assert found == pytest.approx(logprobs_of(student, [hinted])[0][0], abs=1e-4)
    assert found != pytest.approx(logprobs_of(student, [sample])[0][0], abs=1e-2)
    other = replace(sample, segments=(samples.SampledSegment([5, 6, 7], [(2, 3)], sampler=[-1.0]),))
    with pytest.raises(UsageError, match="does not end with the generation prompt"):
        teachers.scores([other], setup.engine, 8192)


def test_a_template_without_a_second_user_message_refuses_a_hint(
    root: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    own = AutoTokenizer.from_pretrained(root / "data" / "tiny_policy" / "tokenizer")
    own.chat_template = "{% if messages | length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}Q A:"
    with pytest.raises(ConfigError, match=r"algorithm\.teacher\.hint: .*"):
        teacher.Hint("x", own)


def test_the_fields_that_a_hint_names_are_read_from_the_rows_and_checked_before_the_first_step(
    student: Path, tmp_path: Path
) -> None:
    row = {"answer": {"value": 7}, "agent_ref": {"name": "a"}, "reward": 1.0, "ng": {}}
    assert samples.missing_field(row, {"answer.value"}) is None
    assert samples.task_field(row, "answer.value") == "7" and samples.task_field(row, "answer") == '{"value": 7}'
    assert samples.missing_field(row, {"gold"}) == "the task has no field 'gold', which algorithm.teacher.hint names"
    with serving(Stub(student, equal_share=8)) as stub:
        words = [*arguments(tmp_path, student, stub, 2), "evaluation=null", "algorithm.name=distillation"]
        words.append('algorithm.teacher={current_policy: true, hint: "It is {gold}."}')
        output, _ = (process := train(tmp_path, words)).communicate(timeout=600)
    assert process.returncode != 0 and "the task has no field 'gold'" in output


def test_a_live_run_learns_from_itself_with_a_hint(
    student: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with serving(Stub(student, equal_share=8)) as stub:
        words = [*arguments(tmp_path, student, stub, 2), "evaluation=null", "algorithm.name=distillation"]
        tasks = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
        for number, task in enumerate(tasks):
            messages = [{"role": "user", "content": f"What is {number} + 1?"}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            known = number + 1 if number % 3 else "x " * 300  # with this hint it is too long
            task |= {"prompt": tokenizer.encode(text, add_special_tokens=False), "sum": {"is": known}}
        (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
        words.append('algorithm.teacher={current_policy: true, hint: "It is {sum.is}."}')
        output, _ = (process := train(tmp_path, [*words, "rollouts.updates_per_step=2"])).communicate(timeout=600)
        assert process.returncode == 0, output
    rows = [row for row in metrics_of(tmp_path) if "teacher_kl" in row]
    assert len(rows) == 2 and all(row["grad_norm"] > 0 for row in rows)
    assert any(row["teacher_too_long"] for row in rows), rows
    assert output.count("are longer than a teacher's context (with its hint): they train nothing") == 1, output
