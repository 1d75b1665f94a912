"""A service's file that cannot be loaded: one line with the file, the line and the problem."""

import re
from pathlib import Path

import pytest

from ngym.errors import ConfigError
from ngym.services.base.app import load


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import json\ndef verify(row)\n    return 1\n", "app.py:2: expected ':': def verify(row)"),
        ("verify = '\n", "app.py:1: unterminated string literal (detected at line 1): verify = '"),
        ("import no_such_module\n", "app.py: No module named 'no_such_module'; install its dependencies"),
        ("verify = 1\n", "app.py: defines neither `app = gym_server"),
        ("app = 3\n", "app.py: `app` is a int; make it with gym_server, agent or model_server"),
        (
            "from ngym import gym_server\n\napp = gym_server()\n",
            "app.py:3: TypeError: gym_server() missing 1 required keyword-only argument: 'verify'",
        ),
        ("def table():\n    return {}['x']\n\nrows = table()\n", "app.py:2: KeyError: 'x'"),
    ],
)
def test_what_is_wrong_with_an_authors_file_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "app.py").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load(tmp_path / "app.py")
    assert "\n" not in str(caught.value)


def test_packages_of_its_own_are_named_by_its_requirements(tmp_path: Path) -> None:
    folder = tmp_path / "gym_servers" / "bridge"
    folder.mkdir(parents=True)
    (folder / "app.py").write_text("import no_such_module\n")
    (folder / "requirements.txt").touch()
    remedy = "; its stanza needs `requirements: gym_servers/bridge/requirements.txt`"
    with pytest.raises(ConfigError, match=f"app.py: No module named 'no_such_module'{remedy}$"):
        load(folder / "app.py")


def test_what_may_pass_is_not_a_mistake_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("raise TimeoutError('the data server is slow')\n")
    with pytest.raises(TimeoutError):
        load(tmp_path / "app.py")
