"""Tests an environment without a model: its gold answers get their rewards, damaged ones less (`ng_validate`).

The checks go over the wire that agents use:

    rows       every shipped row is a task that the server accepts; no row of validation is in training
    gold       each case gets its expected reward
    worse      damaged forms of the best answers are scored, and get less: nothing, noise, half of it
    tools      each tool takes a call: it reports errors to the model, and does not crash
    again      the same answer gets the same reward, also as its own stored row
    together   64 sessions at once get what each gets alone
    time       95 of 100 verifications take less than the limit

A line of gold.jsonl is a case:

    {"case": "in words", "task": {the row's own fields}, "text": "the answer", "expect": {"reward": 1.0, ...}}

Instead of `text`, `output` has Responses items; `calls` ([tool, arguments]) are made first, in the case's session;
`worse` lists the damaged forms that must get less: `empty` (nothing said or called), `garbage` (noise) and `cut`
(half of the calls, half of the text); default: all three.

A scripted model replaces a judge. This shows that questions arrive, verdicts are read and rewards computed, and
nothing about how well a model judges.

    ---
    description: A final formula or number, compared by math-verify.
    domain: math
    kind: single_turn
    license: Apache-2.0
    public_sets: {GSM8K: MIT}
    ---

`license` is that of its data. `public_sets` (optional) maps public training sets to their licences.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Collection, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ngym.config.service_config import Config, Stanza
from ngym.config.shipped_files import shipped_path
from ngym.config.yaml_tree import ConfigTree, parse
from ngym.did_you_mean import did_you_mean
from ngym.errors import ConfigError, PeerTimeout, ServiceError, UsageError
from ngym.files.jsonl import Line, check_lines
from ngym.files.task_rows import assistant_message
from ngym.peers import Peer
from ngym.schema import Json

Damaged = Literal["empty", "garbage", "cut"]
ALL_WORSE: tuple[Damaged, ...] = ("empty", "garbage", "cut")
GOLD = "gold.jsonl"
ROWS = ("train.jsonl", "validation.jsonl", "example.jsonl")
MODEL = "model.jsonl"


class Case(BaseModel):
    """An answer whose reward is known."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    case: str
    task: Json
    text: str = ""
    output: tuple[Json, ...] | None = None
    calls: tuple[tuple[str, Json], ...] = ()
    expect: Json
    worse: tuple[Damaged, ...] = ALL_WORSE

    @property
    def items(self) -> list[Json]:
        """A text as the items of a response."""
        return [assistant_message(self.text)] if self.output is None else list(self.output)

    @property
    def reward(self) -> float | None:
        reward: float | None = self.expect.get("reward")
        return reward


class Environment(NamedTuple):
    """A gym server of the config and the folder of its data."""

    name: str
    data: Path

    def cases(self) -> list[Case]:
        """The cases. UsageError, with file and line, for an invalid one."""
        return [_case(line.row, f"{self.data / GOLD}:{line.number}") for line in _lines(self.data / GOLD)]

    def rows(self, file: str) -> list[Json]:
        """Of train.jsonl, validation.jsonl or example.jsonl; empty if there is no such file."""
        return [line.row for line in _lines(self.data / file)]


def find_environment(config: Config, stanza: Stanza) -> Environment | None:
    """The data of a gym server, from the first of its `data_places` with a gold.jsonl; None if there is none."""
    if stanza.app is None:
        return None
    data = next((place for place in data_places(config.root, stanza.app) if (place / GOLD).is_file()), None)
    return Environment(stanza.name, data) if data is not None else None


def data_places(root: Path, app: str) -> list[Path]:
    """The folders that may have the data of `gym_servers/NAME`: `data` in the folder of its app or data/NAME beside the
    config, then the shipped data.
    """
    folder = app_folder(app)
    return [root / folder / "data", root / "data" / folder.name, shipped_path(Path("data") / folder.name)]


def app_folder(app: str) -> Path:
    """The folder of `gym_servers/NAME`, also written `gym_servers/NAME/app.py`; its name is that of its data."""
    path = Path(app)
    return path.parent if path.name == "app.py" else path.with_name(path.stem)


def _lines(path: Path) -> list[Line]:
    """None if there is no such file."""
    return list(check_lines(path, lambda row: None)) if path.is_file() else []


def _case(row: Json, where: str) -> Case:
    try:
        return Case.model_validate(row)
    except ValidationError as error:
        wrong: Any = error.errors()[0]
        raise UsageError(f"{where}: {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None


def named_services(config: Config, name: str) -> list[str]:
    """The services that a service's options name, such as a judge."""
    values = config.services[name].options.values()
    return [value for value in values if isinstance(value, str) and value in config.services]


def config_for_scoring(config: Config, gyms: Collection[str], models: bool, remedy: str) -> Config:
    """The part of the config that must run for these gym servers to score.

    Raises:
        ConfigError: one of them asks a model, and `models` is false.
    """
    part = config.only(gyms)
    for gym in sorted(gyms):
        if not models and (needed := named_services(config, gym)):
            where = config.services[gym].where
            raise ConfigError(f"{where}: {gym!r} asks {', '.join(needed)} for its rewards; {remedy}")
    return part


def can_be_alone(config: Config, environment: Environment) -> bool:
    """Whether it calls no other service, or only models that its scripted one can replace."""
    needed = named_services(config, environment.name)
    scripted = (environment.data / MODEL).is_file()
    return not needed or (scripted and all(config.services[name].kind == "model" for name in needed))


def with_stand_ins(config: Config, environments: Sequence[Environment]) -> Config:
    """Of the config: these environments, which `can_be_alone`, and a scripted model for each that asks one."""
    services: dict[str, Stanza] = {}
    for environment in environments:
        stanza = config.services[environment.name]
        needed = named_services(config, environment.name)
        if needed:
            scripted = f"{environment.name}_scripted_model"
            replies = {"file": str((environment.data / MODEL).resolve())}
            services[scripted] = Stanza(name=scripted, kind="model", app="models/scripted", options=replies)
            options = {key: scripted if value in needed else value for key, value in stanza.options.items()}
            stanza = stanza.model_copy(update={"options": options})
        services[environment.name] = stanza
    return config.model_copy(update={"services": services})


CALL_S = 120.0  # of a tool or of `/verify`, as agents wait for a tool by default
SESSIONS = 64
CONCURRENCY = 32  # of rows
SHOWN = 5  # mistakes of a check
NOISE = 'The \x00 \ufffd } ]] "answer" <tool_call>{"name": None \\frac{ 🤷 <think> SELECT ; ' * 3
PARAMS: Json = {"input": "a question"}
_FORMS = {"empty": "saying nothing", "garbage": "noise", "cut": "half of it"}


class Finding(NamedTuple):
    """The subject of a check, and its mistakes; none: it is right."""

    check: str
    looked_at: str
    mistakes: list[str]


async def validate_environment(
    environment: Environment, peer: Peer, within_s: float, call_s: float = CALL_S
) -> list[Finding]:
    """All findings; only that of the gold answers if a call takes longer than `call_s`.

    Raises:
        UsageError: a file of the environment cannot be read.
    """
    cases = environment.cases()
    answers: list[tuple[Json, float]] = []
    for case in cases:
        answers.append(await _attempt(peer, call_s, case))
        if error := answers[-1][0].get("late"):
            mistake = f"{case.case}: {error}; the other checks were not made"
            return [Finding("gold", f"{len(answers)} of {len(cases)} cases", [mistake])]
    return [
        await _rows(environment, peer),
        _gold(cases, [answer for answer, _ in answers], {tool["name"] for tool in await peer.get("/tools")}),
        await _check_damaged_forms(peer, call_s, cases),
        await _tools(peer, call_s, cases),
        await _check_repeats(peer, call_s, cases, [answer for answer, _ in answers]),
        await _check_concurrency(peer, call_s, cases),
        _time([seconds for _, seconds in answers], within_s),
    ]


async def _attempt(
    peer: Peer,
    call_s: float,
    case: Case,
    output: Sequence[Json] | None = None,
    calls: int | None = None,
    row: Json | None = None,
) -> tuple[Json, float]:
    """The answer of `/verify`, and its seconds. A refusal is an answer without a reward; without an answer it is `late`.

    output, calls: in the place of the case's own, and how many of its calls. row: its stored row, in the place of the
    task.
    """
    session = peer.session()
    response = {"output": list(case.items if output is None else output)}
    request = {"responses_create_params": PARAMS, **case.task, "response": response} if row is None else row
    try:
        await session.post("/seed_session", request, timeout=call_s)
        for tool, arguments in case.calls[:calls]:
            await _call(session, call_s, tool, arguments)
        began = time.perf_counter()
        answer: Json = await session.post("/verify", request, timeout=call_s)
    except PeerTimeout as error:
        return {"refused": error.detail, "late": error.detail}, 0.0
    except ServiceError as error:
        return {"refused": error.detail}, 0.0
    return answer, time.perf_counter() - began


async def _call(session: Any, call_s: float, tool: str, arguments: Json) -> None:
    """As an agent does: what a tool refuses is a text that the model sees."""
    try:
        await session.request(f"/{tool}", arguments, timeout=call_s)
    except ServiceError as error:
        if not error.is_for_the_model:
            raise


def _gold(cases: Sequence[Case], answers: Sequence[Json], tool_names: set[str]) -> Finding:
    mistakes = [
        wrong + _unknown(case, tool_names)
        for case, answer in zip(cases, answers, strict=True)
        if (wrong := _mismatch(case, answer))
    ]
    return Finding("gold", f"{len(cases)} cases", mistakes)


def _unknown(case: Case, tool_names: set[str]) -> str:
    """A misspelled call is answered as the model's would be, and so only shows in the reward."""
    unknown = sorted({tool for tool, _ in case.calls} - tool_names)
    return (
        f"; it calls {unknown[0]!r}, which is not a tool of this server{did_you_mean(unknown[0], tool_names)}"
        if unknown
        else ""
    )


def _mismatch(case: Case, answer: Json) -> str:
    if "refused" in answer:
        return f"{case.case}: refused: {answer['refused']}"
    got = {name: answer.get(name) for name in case.expect}
    right = all(_is_equal(got[name], expected) for name, expected in case.expect.items())
    return "" if right else f"{case.case}: got {got}, must be {case.expect}"


def _is_equal(got: Any, expected: Any) -> bool:
    """Numbers may differ by what adding them up in another order makes."""
    if isinstance(got, float) and isinstance(expected, float):
        return math.isclose(got, expected, rel_tol=1e-9, abs_tol=1e-9)
    return bool(got == expected)


async def _check_damaged_forms(peer: Peer, call_s: float, cases: Sequence[Case]) -> Finding:
    """Of the cases with the highest reward."""
    most = max((case.reward for case in cases if case.reward is not None), default=0.0)
    best = [case for case in cases if case.reward == most > 0]
    mistakes = []
    for case in best:
        for form in case.worse:
            answer, _ = await _attempt(peer, call_s, case, *_damage(case, form))
            reward = answer.get("reward")
            if "refused" in answer:
                mistakes.append(f"{case.case}: {_FORMS[form]} is refused: {answer['refused']}")
            elif reward is not None and reward >= most:
                mistakes.append(f"{case.case}: {_FORMS[form]} gets {reward} too")
    if not best:
        mistakes.append(
            "no case has a reward above 0: nothing shows that the verifier distinguishes right and wrong answers"
        )
    return Finding("worse", f"{len(best)} of the best, damaged", mistakes)


def _damage(case: Case, form: Damaged) -> tuple[list[Json], int]:
    """(output, how many of the calls)."""
    if form == "empty":
        return [], 0
    if form == "garbage":
        return [assistant_message(NOISE)], 0
    items = case.items
    if len(items) > 1:
        return items[: len(items) // 2], len(case.calls) // 2
    return [assistant_message(case.text[: len(case.text) // 2])], len(case.calls) // 2


async def _tools(peer: Peer, call_s: float, cases: Sequence[Case]) -> Finding:
    """Those that the cases do not call anyway, with arguments made of their schemas."""
    called_names = {tool for case in cases for tool, _ in case.calls}
    server_tools = await peer.get("/tools")
    tools = [tool for tool in server_tools if tool["name"] not in called_names]
    mistakes = []
    for tool in tools if cases else ():
        session = peer.session()
        try:
            await session.post("/seed_session", {"responses_create_params": PARAMS, **cases[0].task})
            await _call(session, call_s, tool["name"], _sample(tool.get("parameters") or {}))
            await session.request("/session", None, method="DELETE")
        except ServiceError as error:
            mistakes.append(f"{tool['name']}: {error.detail}")
    summary = "gold cases call all" if server_tools else "none"
    if tools:
        summary = f"{len(tools)} that no gold case calls, tried with made-up arguments"
    return Finding("tools", summary, mistakes)


def _sample(schema: Json) -> Any:
    """A value of about this kind: a tool has to refuse another one just as well."""
    if "properties" in schema:
        return {name: _sample(member) for name, member in schema["properties"].items()}
    if schema.get("enum"):
        return schema["enum"][0]
    return {"string": "a", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}.get(
        str(schema.get("type"))
    )


async def _check_repeats(peer: Peer, call_s: float, cases: Sequence[Case], answers: Sequence[Json]) -> Finding:
    mistakes = []
    for case, first in zip(cases, answers, strict=True):
        if "refused" in first:
            continue
        second, _ = await _attempt(peer, call_s, case)
        stored, _ = await _attempt(peer, call_s, case, row=first)
        for answer, what in ((second, "a second time"), (stored, "as its own stored row")):
            if _scores(answer) != _scores(first):
                mistakes.append(f"{case.case}: {what} it gets {_scores(answer)}, not {_scores(first)}")
    return Finding("again", f"{len(cases)} cases, each twice and as a stored row", mistakes)


def _scores(answer: Json) -> tuple[Any, Any]:
    return answer.get("reward"), answer.get("reward_components")


async def _check_concurrency(peer: Peer, call_s: float, cases: Sequence[Case]) -> Finding:
    several = list(islice(cycle(cases), SESSIONS)) if cases else []
    answers = await asyncio.gather(*(_attempt(peer, call_s, case) for case in several))
    mistakes = {wrong for case, (answer, _) in zip(several, answers, strict=True) if (wrong := _mismatch(case, answer))}
    return Finding("together", f"{len(several)} sessions at once", sorted(mistakes))


def _time(seconds: Sequence[float], within_s: float) -> Finding:
    if not seconds:
        return Finding("time", "nothing", [])
    ascending = sorted(seconds)
    middle, slow = ascending[len(ascending) // 2], ascending[math.ceil(0.95 * len(ascending)) - 1]
    mistakes = [f"95 of 100 verifications may take {within_s:g} s, and took {slow:.2g} s"] if slow > within_s else []
    return Finding("time", f"median {1000 * middle:.1f} ms, 95 of 100 in {1000 * slow:.1f} ms", mistakes)


async def _rows(environment: Environment, peer: Peer) -> Finding:
    files = {file: environment.rows(file) for file in ROWS}
    tool_names = {tool["name"] for tool in await peer.get("/tools")}
    limit = asyncio.Semaphore(CONCURRENCY)

    async def wrong(file: str, number: int, row: Json) -> str:
        declared = {tool.get("name") for tool in row.get("responses_create_params", {}).get("tools") or ()}
        if tool_names and not declared <= tool_names:
            return f"{environment.data / file}:{number}: no such tool: {', '.join(sorted(map(str, declared - tool_names)))}"
        async with limit:
            try:
                session = peer.session()
                await session.post("/seed_session", row)
                await session.request("/session", None, method="DELETE")
            except ServiceError as error:
                return f"{environment.data / file}:{number}: {error.detail}"
        return ""

    checks = [wrong(file, number, row) for file, rows in files.items() for number, row in enumerate(rows, 1)]
    mistakes = [mistake for mistake in await asyncio.gather(*checks) if mistake]
    train = {_question(row) for row in files["train.jsonl"]}
    mistakes += [
        f"{environment.data / 'validation.jsonl'}:{number}: this task is also in train.jsonl"
        for number, row in enumerate(files["validation.jsonl"], 1)
        if _question(row) in train
    ]
    return Finding("rows", f"{sum(map(len, files.values()))} rows", mistakes)


def _question(row: Json) -> str:
    return repr(row.get("responses_create_params", {}).get("input")) + repr(
        {
            name: value
            for name, value in sorted(row.items())
            if not name.startswith("_") and name != "responses_create_params"
        }
    )


async def check_facts(environment: Environment, readme: Path, peer: Peer) -> Finding:
    """The finding `facts`. UsageError when a file of the environment cannot be read."""
    try:
        facts = facts_in(readme)
    except ConfigError as error:
        return Finding("facts", readme.name, str(error).splitlines())
    kind = await _kind_of(environment, peer)
    wrong = [] if facts.kind == kind else [f"{readme}: kind is {facts.kind}, and what is offered is {kind}"]
    return Finding("facts", f"{facts.domain}, {facts.kind}, {facts.license}{await _rewards_of(peer)}", wrong)


async def _rewards_of(peer: Peer) -> str:
    """The declared range of the rewards as text; "" without one."""
    match (await peer.get("/openapi.json"))["paths"]["/verify"]["post"]["responses"]:
        case {
            "200": {
                "content": {
                    "application/json": {"schema": {"properties": {"reward": {"minimum": low, "maximum": high}}}}
                }
            }
        }:
            return f", rewards {low:g} to {high:g}"
    return ""


async def _kind_of(environment: Environment, peer: Peer) -> EnvironmentKind:
    """Tools may be the server's, or the rows' own."""
    if "/reset" in (await peer.get("/openapi.json"))["paths"]:
        return "steps"
    rows = (row for file in ROWS for row in environment.rows(file))
    if await peer.get("/tools") or any(row.get("responses_create_params", {}).get("tools") for row in rows):
        return "tools"
    return "single_turn"


# The names that NeMo Gym uses.
Domain = Literal[
    "math", "coding", "agent", "knowledge", "instruction_following", "long_context", "safety", "games", "translation",
    "e2e", "rlhf", "other",
]  # fmt: skip
EnvironmentKind = Literal["tools", "single_turn", "steps"]
FENCE = "---"
FORM = "---, description, domain, kind, license (a line each, `key: value`), ---"


class EnvironmentInfo(BaseModel):
    """kind: `tools` calls tools, `single_turn` only answers, `steps` plays turn by turn. license: SPDX if possible."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    description: str = Field(min_length=1, max_length=120, pattern=r"^[^\n]*$")
    domain: Domain
    kind: EnvironmentKind
    license: str = Field(min_length=1)
    public_sets: dict[str, str] = {}


def readme_of(app: Path) -> Path:
    """The file with the card of a gym server: README.md in the folder of app.py; my_env.md next to my_env.py."""
    return app.with_name("README.md") if app.name == "app.py" else app.with_suffix(".md")


def facts_in(readme: Path) -> EnvironmentInfo:
    """Read the card of a README; raises a ConfigError with file and line if it is missing or wrong."""
    file_name = os.path.relpath(readme) if readme.is_relative_to(Path.cwd()) else str(readme)
    try:
        lines = readme.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(
            f"{file_name}: cannot be read ({reason}); an environment's README begins with {FORM}"
        ) from None
    if lines[:1] != [FENCE] or FENCE not in lines[1:]:
        raise ConfigError(f"{file_name}:1: the facts of the environment are missing; begin the file with {FORM}")
    return parse(EnvironmentInfo, _tree("\n".join(lines[1 : lines.index(FENCE, 1)]), file_name))


def _tree(text: str, file_name: str) -> ConfigTree:
    try:
        node, values = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None)
        where = f"{file_name}:{mark.line + 2}" if mark else file_name
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{file_name}:2: expected `key: value` lines between the two {FENCE}")
    # The first line is the fence, and yaml counts from 0.
    places = {str(key.value): f"{file_name}:{key.start_mark.line + 2}" for key, _ in node.value}
    return ConfigTree(values, places, default_where=f"{file_name}:1")
