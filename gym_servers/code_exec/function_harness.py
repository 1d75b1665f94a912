"""Runs in the sandbox: calls a function and writes what it returns, as plain JSON, to file descriptor 3.

It has no expected values, so the code that it runs cannot learn them.
"""

import json
import os
import sys
from types import ModuleType
from typing import Any

ANSWER_FD = 3
MODULE = "answer"


def main() -> None:
    request = json.loads(sys.stdin.read())
    # Import, as a test does: code under `if __name__ == "__main__"` does not run.
    module = sys.modules[MODULE] = ModuleType(MODULE)
    exec(compile(request["source"], "answer.py", "exec"), module.__dict__)  # noqa: S102  (in the sandbox)
    name = request["function"]
    solution = getattr(module, "Solution", None)
    named = solution() if solution is not None and hasattr(solution, name) else module
    function = getattr(named, name)
    for number, call in enumerate(request["calls"]):
        try:
            answer = {"value": plain(function(*call["args"], **call["kwargs"]))}
            line = json.dumps({"call": number, **answer})
        except BaseException as error:  # noqa: BLE001  (SystemExit too: the next call must still run)
            line = json.dumps({"call": number, "error": type(error).__name__})
        line += "\n"
        data = line.encode()
        while data:
            data = data[os.write(ANSWER_FD, data) :]


def plain(value: Any) -> Any:
    """A JSON value: tuples become lists, keys text, numpy values Python values, and a set `{"set": [...]}`.

    Anything else (a generator, a range, a deque) becomes `{"type": name}`, which equals no expected value.
    """
    if type(value).__module__ == "numpy":
        value = value.tolist()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int.__add__(value, 0)
    if isinstance(value, float):
        return float.__add__(value, 0.0)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return {"set": sorted((plain(item) for item in value), key=repr)}
    return {"type": type(value).__name__}


main()
