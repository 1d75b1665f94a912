"""Runs in the sandbox: calls a function and writes what it returns, as plain JSON, to file descriptor 3.

It knows no expected value, so the code that it runs may do with it whatever it likes.
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
    # Imported, as a test does it: what stands under `if __name__ == "__main__"` is not part of the function.
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
        except BaseException as error:  # noqa: BLE001  (SystemExit too: the next call comes all the same)
            line = json.dumps({"call": number, "error": type(error).__name__})
        line += "\n"
        data = line.encode()
        while data:
            data = data[os.write(ANSWER_FD, data) :]


def plain(value: Any) -> Any:
    """As JSON: tuples are lists, keys are text, numpy's values are Python's; a set says that it is one.

    Whatever else it is (a generator, a range, a deque) is not a list: it says its type, which equals no expected value.
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
