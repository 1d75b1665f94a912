"""A hundred mistakes in the shipped config: each is refused in one line with its file and line, and nothing in it
runs."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from ngym.config.service_config import load_config
from ngym.config.shipped_files import app_file
from ngym.errors import ConfigError
from ngym.services.base.app import load
from ngym.services.base.options import parse_options

BOMB = "".join(f"    l{n}: &l{n} [{', '.join([f'*l{n - 1}' if n else 'x'] * 9)}]\n" for n in range(12))
EXTRA = "extra:\n  kind: model\n  app: models/scripted\n"
# What a key of any stanza may be given: none of it is a port, a number of replicas, a kind, a service or an app.
WRONG = ["[]", "[1, 2]", "{a: b}", "-1", "1e999", ".nan", "99999999", "9" * 5000, "2020-13-45", "!!binary x", "nowhere"]
UNSAFE = [
    '!!python/object/apply:os.mkdir ["canary"]',
    "!!python/name:os.system",
    "!!python/module:os",
    '!!python/object/new:os.mkdir {args: ["canary"]}',
    "!!set {a, b}",
    "!unheard-of x",
    "${nowhere.x}",
    "${oc.env:NGYM_THAT_IS_NOT_SET}",
    "${unheard_of:x}",
    "${",
    "???",
    "*nowhere",
    "'",
    "[",
    '"\\q"',
]
ADDRESSES = ["ftp://x", "http://", "file:///etc/passwd", "http://a@b", "http://169.254.169.254", "x", "http://h:99999"]


def mutations(text: str) -> list[tuple[str, bytes]]:
    """(what was done, the file) of each mistake; where it is made is drawn."""
    draw = random.Random(6)
    lines = text.splitlines(keepends=True)

    def at(pattern: str, near: str = "") -> int:
        found = [number for number, line in enumerate(lines) if re.match(pattern, line)]
        return draw.choice([number for number in found if near in "".join(lines[number - 2 : number + 1])])

    def replace_line(place: int, line: str) -> bytes:
        return "".join([*lines[:place], line, *lines[place + 1 :]]).encode()

    mistakes: list[tuple[str, bytes]] = []
    for key in ("kind", "app", "gym", "model"):  # a letter too many, too few, or another one
        for _ in range(6):
            place = at(rf"  {key}: (?!runs/)", near="agents/simple" if key in ("gym", "model") else "")
            line = lines[place].split("#")[0].rstrip()
            cut = draw.randrange(2, 2 + len(key)) if draw.random() < 0.5 else draw.randrange(6 + len(key), len(line))
            mistakes.append(
                (
                    f"{key}: a letter, {line}",
                    replace_line(place, line[:cut] + draw.choice(["", "q"]) + line[cut + 1 :] + "\n"),
                )
            )
    for key in ("kind", "replicas", "port"):
        for value in WRONG:
            place = at("  kind: ")
            prefix = "" if key == "kind" else lines[place]
            mistakes.append((f"{key}: {value[:20]}", replace_line(place, f"{prefix}  {key}: {value}\n")))
    for value in UNSAFE:
        mistakes.append((value, replace_line(at("  app: "), f"  app: {value}\n")))
    mistakes += [(url, replace_line(at("  app: gym"), f"  url: {url}\n")) for url in ADDRESSES]
    same = "".join(f"{name}:\n  kind: model\n  app: models/scripted\n  port: 7001\n" for name in ("one", "two"))
    ends = {
        "the same port": same,
        "the port of the head": f"{EXTRA}  port: 11000\n",
        "the same name": "policy: {kind: model, app: models/scripted}\n",
        "a bomb": f"{EXTRA}  bomb:\n{BOMB}",
        "itself": "extra: &e\n  kind: model\n  me: *e\n",
        "a cycle": EXTRA + "  a: ${extra.b}\n  b: ${extra.a}\n",
        "depth": f"extra: {'[' * 3000}{']' * 3000}\n",
        "depth of names": f"extra: {'{a: ' * 100}b{'}' * 100}\n",
        "a number as a name": "3: {kind: model, app: models/scripted}\n",
        "a list as a name": "? [a, b]\n: {kind: model}\n",
        "nothing as a name": "~: {kind: model}\n",
        "a path as a name": "../x: {kind: model, app: models/scripted}\n",
        "no service": "extra: 3\n",
        "no kind": "extra: {app: models/scripted}\n",
        "no app": "extra: {kind: model}\n",
        "a tab": "extra:\n\tkind: model\n",
        "a null byte": "extra: \0\n",
        "settings": "ngym: {hots: 127.0.0.1}\n",
        "a setting": "ngym: {head: {port: many}}\n",
        "no settings": "ngym: 3\n",
    }
    mistakes += [(name, (text + end).encode()) for name, end in ends.items()]
    mistakes.append(("no text", text.encode() + b"x: \xff\xfe\n"))
    return mistakes


def check(file: Path) -> None:
    """As a run does it: the config, then the options of each service that may have changed."""
    config = load_config([file])
    for stanza in config.services.values():
        if stanza.app == "agents/simple":
            model = load(app_file(stanza.app, config.root)).app.state.options_model
            parse_options(model, stanza.options, stanza.key_where, stanza.where, config.services)


def test_a_hundred_mistakes_are_refused_each_with_its_file_and_line(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stanzas = (root / "global_config.yaml").read_text("utf-8").split("\n\n")
    mistakes = mutations("\n\n".join(stanzas[:8]) + "\n")
    assert len(mistakes) >= 100
    file = tmp_path / "global_config.yaml"
    accepted: list[str] = []
    for name, content in mistakes:
        file.write_bytes(content)
        try:
            check(file)
        except ConfigError as error:
            for line in str(error).splitlines():
                assert re.match(r"global_config\.yaml:\d+: \S", line) and len(line) < 400, (name, line)
        else:
            accepted.append(name)
    assert not accepted
    assert [path.name for path in tmp_path.iterdir()] == ["global_config.yaml"], "something ran"
