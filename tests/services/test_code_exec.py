"""code_exec: gold cases, generated rows, and solutions that try to get a reward without solving the task."""

import asyncio
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import snippets
from local_services import local_services
from paths import ROOT

from ngym.errors import ConfigError, ServiceError
from ngym.services.base.app import load


def rows(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "data" / "code_exec" / f"{file}.jsonl").read_text().splitlines()]


def request(task: dict[str, Any], text: str) -> dict[str, Any]:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    return {"responses_create_params": {"input": "a question"}, "response": {"output": [message]}, **task}


def code(source: str) -> str:
    return f"```python\n{source}\n```"


@pytest.fixture
async def gym():
    limits = {"cpu_s": 1.0, "wall_s": 60.0, "memory_mib": 256}
    async with local_services(
        {"code_exec": {"limits": limits}}, code_exec=load(ROOT / "gym_servers/code_exec/app.py").app
    ) as p:
        yield p["code_exec"]


async def test_every_gold_case_gets_the_reward_it_must_get(gym):
    cases = rows("gold")
    answers = await asyncio.gather(*(gym.post("/verify", request(case["task"], case["text"])) for case in cases))
    results = [{key: answer.get(key) for key in case["expect"]} for case, answer in zip(cases, answers, strict=True)]
    wrong = [(c["case"], g, a["reason"]) for c, g, a in zip(cases, results, answers, strict=True) if g != c["expect"]]
    assert not wrong


async def test_every_shipped_row_has_tests_that_its_own_answers_pass_and_a_constant_does_not(gym):
    async def reward(row: dict[str, Any], source: str) -> float:
        answer = await gym.post(
            "/verify", request({k: v for k, v in row.items() if k != "responses_create_params"}, code(source))
        )
        return answer["reward"]

    def lookup(row: dict[str, Any]) -> str:
        if "function" in row:
            return f"TABLE = {[(c['args'][0], c['expected']) for c in row['cases']]!r}\ndef solve(items):\n    return next(v for k, v in TABLE if k == items)"
        return f"TABLE = { {c['stdin']: c['stdout'] for c in row['cases']}!r}\nimport sys\nprint(TABLE[sys.stdin.read()], end='')"

    def constant(row: dict[str, Any]) -> str:
        case = row["cases"][0]
        if "function" in row:
            return f"def solve(items):\n    return {case['expected']!r}"
        return f"print({case['stdout']!r}, end='')"

    sample = rows("validation")
    assert {await reward(row, lookup(row)) for row in sample} == {1.0}
    assert {await reward(row, constant(row)) for row in sample} == {0.0}


# Each would be paid by a grader that compares in the process, trusts an exit code or believes what is printed.
HACKS = {
    "walks the frames for what is expected": """
import sys, gc
def add(a, b):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
            if isinstance(value, dict) and "expected" in value: return value["expected"]
            if isinstance(value, list):
                for item in value:
                    if isinstance(item, dict) and "expected" in item: return item["expected"]
        frame = frame.f_back
    for value in gc.get_objects():
        if isinstance(value, dict) and "expected" in value: return value["expected"]
""",
    "looks for the answer in the memory of others": """
import os
def add(a, b):
    for pid in (os.getppid(), 1, "self"):
        for name in ("environ", "cmdline", "maps", "mem"):
            try: data = open(f"/proc/{pid}/{name}", "rb").read(10**6)
            except OSError: continue
            if b"sentinel" in data: return a * 1000 + b
""",
    "patches the comparison and the builtins": """
import builtins, json, operator, math
for module in (builtins, json, operator, math):
    for name in ("eq", "isclose", "loads", "all", "any", "type", "isinstance"):
        if hasattr(module, name): setattr(module, name, lambda *a, **k: True)
def add(a, b): return True
""",
    "leaves a thread and an exit handler that answer later": """
import atexit, os, threading, time
def late():
    while True:
        os.write(3, b'{"call": 0, "value": 7}\\n')
        time.sleep(0.001)
threading.Thread(target=late, daemon=True).start()
atexit.register(lambda: os.write(3, b'{"call": 0, "value": 8}\\n'))
def add(a, b): raise SystemExit(0)
""",
    "sends a pickle": """
import os, pickle
class Bomb:
    def __reduce__(self): return (os.system, ("touch /tmp/ngym-pickle",))
os.write(3, pickle.dumps(Bomb()) + b"\\n")
def add(a, b): return Bomb()
""",
    "answers with a number of a million digits": "def add(a, b): return 10**1000000",
    "answers with a nest": "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
    "answers a lot": "def add(a, b): return 'x' * 10**9",
    "writes answers without end": "import os\nwhile True: os.write(3, b'[[[[{\\n' * 1000)",
    "prints without end": "while True: print('passed ' * 1000)",
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "starts threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "recurses": "import sys\nsys.setrecursionlimit(10**9)\ndef add(a, b): return add(a, b)",
    "overflows the stack of C": "import ctypes\nctypes.string_at(0)",
    "raises what cannot be shown": "class E(BaseException):\n    def __str__(self): raise E\n    __repr__ = __str__\ndef add(a, b): raise E()",
    "traces the harness": """
import sys
def trace(frame, event, arg):
    if "number" in frame.f_locals: frame.f_locals["number"] = 0
    return trace
sys.settrace(trace)
def add(a, b): return None
""",
    "changes what small numbers are": """
import ctypes
ctypes.memmove(id(1) + 24, id(7) + 24, 4)
def add(a, b): return 1
""",
    "asks the network": """
import socket
def add(a, b):
    s = socket.create_connection(("127.0.0.1", 80), 1); s.send(b"x"); return 7007
""",
    "reads the shipped answers": """
import glob
def add(a, b):
    return len(glob.glob("/**/gold.jsonl", recursive=True)) or len(glob.glob("/**/*.jsonl", recursive=True))
""",
}  # fmt: skip


async def test_no_hack_is_paid_and_each_is_a_verdict(gym):
    task = {"function": "add", "cases": [{"args": [7, 7], "expected": 7007}, {"args": [8, 1], "expected": 8001}]}
    answers = await asyncio.gather(*(gym.post("/verify", request(task, code(hack))) for hack in HACKS.values()))
    verdicts = {name: (answer["reward"], answer["passed"]) for name, answer in zip(HACKS, answers, strict=True)}
    assert verdicts == dict.fromkeys(HACKS, (0.0, 0)), [a["reason"] for a in answers]
    assert not Path("/tmp/ngym-pickle").exists()
    honest = await gym.post("/verify", request(task, code("def add(a, b):\n    return 1000 * a + b")))
    assert (honest["reward"], honest["passed"]) == (1.0, 2)


async def test_a_sandbox_that_fails_is_null_and_says_which(gym):
    async with local_services(
        {"code_exec": {"sandbox": {"provider": "remote", "url": "http://127.0.0.1:1"}}},
        code_exec=load(ROOT / "gym_servers/code_exec/app.py").app,
    ) as peers:
        task = {"function": "one", "cases": [{"args": [], "expected": 1}]}
        answer = await peers["code_exec"].post("/verify", request(task, code("def one(): return 1")))
    assert (answer["reward"], answer["outcome"], answer["tier"]) == (None, "infra_error", "remote")
    assert "sandbox server" in answer["reason"]


async def test_the_sandbox_of_the_documentation_runs_the_programs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = snippets(ROOT / "docs" / "toolbox.md")
    (tmp_path / "sandboxes.py").write_text(next(each.text for each in page if "class CommandSandbox" in each.text))
    options = {"provider": "sandboxes.py:CommandSandbox", "command": ["nice"]}
    app = load(ROOT / "gym_servers/code_exec/app.py").app
    async with local_services({"code_exec": {"sandbox": options}}, code_exec=app) as peers:
        task = {"cases": [{"stdin": str(n), "stdout": str(n * n)} for n in range(3)]}
        right = await peers["code_exec"].post("/verify", request(task, code("print(int(input()) ** 2)")))
        wrong = await peers["code_exec"].post("/verify", request(task, code("print(int(input()) * 2)")))
        failed = await peers["code_exec"].post("/verify", request(task, code("raise SystemExit(3)")))
    assert [(each["reward"], each["tier"]) for each in (right, wrong, failed)] == [
        (1.0, "command"),
        (0.0, "command"),
        (0.0, "command"),
    ]


async def test_the_share_of_passing_tests_is_paid_on_demand():
    options = {"partial": True, "limits": {"cpu_s": 1.0, "wall_s": 60.0}}
    async with local_services(
        {"code_exec": options}, code_exec=load(ROOT / "gym_servers/code_exec/app.py").app
    ) as peers:
        calls = {"function": "f", "cases": [{"args": [n], "expected": n * n} for n in range(4)]}
        runs = {"cases": [{"stdin": str(n), "stdout": str(n * n)} for n in range(4)]}
        some = "def f(n):\n    if n == 2: raise ValueError\n    return n * n"
        program = "n = int(input())\nprint(n * n if n != 2 else 5)"
        requests = [request(calls, code(some)), request(runs, code(program))]
        answers = await asyncio.gather(*(peers["code_exec"].post("/verify", one) for one in requests))
    assert [(answer["reward"], answer["outcome"]) for answer in answers] == [(0.75, "failed")] * 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (None, "No such file or directory"),
        ('{"task_id": "a"}', "tests.jsonl:1: test: Field required"),
        ("[]", "tests.jsonl:1: not a row with a task_id"),
    ],
)
async def test_a_file_of_tests_that_cannot_be_read_is_named(tmp_path, line, message):
    if line is not None:
        (tmp_path / "tests.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match=message):
        load(ROOT / "gym_servers/code_exec/app.py").tests_of(tmp_path / "tests.jsonl")


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"cases": []},
        {"function": "f", "cases": [{"stdin": "", "stdout": ""}]},
        {"cases": [{"args": [], "expected": 1}]},
    ],
)
async def test_a_row_without_fitting_tests_is_refused(gym, row):
    with pytest.raises(ServiceError, match="cases"):
        await gym.session().post("/seed_session", {"responses_create_params": {"input": "x"}, **row})


async def test_the_shipped_data_is_what_its_script_makes_and_no_question_of_validation_is_in_training(
    gym, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["generate.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "data" / "code_exec" / "generate.py"), run_name="__main__")
    for file in ("train", "validation", "example"):
        assert (tmp_path / f"{file}.jsonl").read_bytes() == (ROOT / "data" / "code_exec" / f"{file}.jsonl").read_bytes()
    prompts = [{row["responses_create_params"]["input"] for row in rows(file)} for file in ("train", "validation")]
    assert not prompts[0] & prompts[1]
    tools = await gym.get("/tools")
    assert all(row["responses_create_params"].get("tools", []) == tools for row in rows("train") + rows("validation"))


FAILS = {
    "raises": "def f(): raise ValueError",
    "exits": "import sys\ndef f(): sys.exit()",
    "exits at once": "import os\ndef f(): os._exit(0)",
    "recurses": "def f(): return f()",
    "takes all memory": "def f(): return [0] * 10 ** 12",
    "fills memory": "def f():\n    x = []\n    while True: x.append(bytearray(1 << 20))",
    "never returns": "def f():\n    while True: pass",
    "is not there": "def g(): return None",
}


async def test_null_is_a_value_that_has_to_be_returned(gym):
    task = {"function": "f", "cases": [{"args": [], "expected": None}]}
    found = {name: (await gym.post("/verify", request(task, code(source))))["reward"] for name, source in FAILS.items()}
    assert found == dict.fromkeys(FAILS, 0.0)
    assert (await gym.post("/verify", request(task, code("def f(): pass"))))["reward"] == 1.0


NULLED = {
    "no CPU time": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile True: pass",
    "no CPU time, by the other call": "import resource\nresource.prlimit(0, resource.RLIMIT_CPU, (0, 0))\nwhile True: pass",
    "a signal to itself": "import os, signal\nfor s in range(1, 65):\n    try: os.kill(os.getpid(), s)\n    except OSError: pass",
    "an alarm": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\nwhile True: pass",
    "no descriptors": "import os\nos.closerange(0, 4096)",
    "the pipes kept in flight": "import array, socket\na, b = socket.socketpair()\n"
    "a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [a.fileno(), b.fileno(), 1, 2, 3]))])",
    "the main thread gone": "import ctypes, threading, time\nthreading.Thread(target=time.sleep, args=(1,)).start()\n"
    "ctypes.CDLL(None).pthread_exit(0)",
    "a null character": "x = '\0'",
    "a nest": "(" * 100_000,
    "half a character": "print('\\udfff')",
    "a low priority": "import os\nos.nice(19)\nwhile True: pass",
}


@pytest.mark.parametrize("kind", ["function", "program"])
async def test_no_program_makes_its_own_reward_null(gym, kind):
    calls, runs = {"function": "f", "cases": [{"args": [], "expected": 1}]}, {"cases": [{"stdin": "", "stdout": "1"}]}
    task = calls if kind == "function" else runs
    answers = await asyncio.gather(*(gym.post("/verify", request(task, code(source))) for source in NULLED.values()))
    assert {name: a["reward"] for name, a in zip(NULLED, answers, strict=True)} == dict.fromkeys(NULLED, 0.0), [
        answer["reason"] for answer in answers
    ]


@pytest.mark.parametrize(
    ("expected", "returned", "reward"),
    [
        (1e-9, "0.0", 0.0),
        (0.0, "1e-9", 0.0),
        (0.0, "0.1 + 0.2 - 0.3", 1.0),
        (1e-9, "1.0000001e-9", 1.0),
        (1e-9, "1.1e-9", 0.0),
        (1.0, "float('nan')", 0.0),
        (1.0, "float('inf')", 0.0),
        ([1, 2], "(1, 2)", 1.0),
        ([1, 2], "(i for i in (1, 2))", 0.0),
        ([1, 2], "range(1, 3)", 0.0),
        ([1, 2], "iter([1, 2])", 0.0),
        ([1, 2], "{1, 2}", 0.0),
        ({"set": [1, 2]}, "{1, 2}", 1.0),
    ],
)
async def test_a_tolerance_is_relative_and_a_list_is_a_list(gym, expected, returned, reward):
    task = {"function": "f", "cases": [{"args": [], "expected": expected}]}
    assert (await gym.post("/verify", request(task, code(f"def f(): return {returned}"))))["reward"] == reward


async def test_a_function_is_imported_and_a_program_is_run(gym):
    asks = "def f(): return 1\nif __name__ == '__main__':\n    print(input())"
    function = {"function": "f", "cases": [{"args": [], "expected": 1}]}
    program = {"cases": [{"stdin": "5", "stdout": "5"}]}
    dataclass = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(): return P(1).x"
    bodies = [request(function, code(asks)), request(program, code(asks)), request(function, code(dataclass))]
    assert [(await gym.post("/verify", body))["reward"] for body in bodies] == [1.0, 1.0, 1.0]


async def test_printed_numbers_are_plain_digits(gym):
    task = {"cases": [{"stdin": "", "stdout": "10 12 0.5"}]}
    printed = ["10 12 0.5", "10.0 12 .5", "1_0 12 0.5", "10 1\u0662 0.5", "10 12 0.\u0665", "10 12 nan"]
    rewards = [(await gym.post("/verify", request(task, code(f"print({text!r})"))))["reward"] for text in printed]
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
