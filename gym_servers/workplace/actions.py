"""All actions in the office, each a tool."""

from __future__ import annotations

import re
from typing import Any

from ngym import ToolError

from . import calendar, files, mails, tasks
from .office import Action, Office

ACTIONS: tuple[type[Action], ...] = (*calendar.ACTIONS, *mails.ACTIONS, *files.ACTIONS, *tasks.ACTIONS)
TOOLS = {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", action.__name__).lower(): action for action in ACTIONS}


def act(office: Office, tool: str, arguments: dict[str, Any] | None) -> Any:
    """Perform an action.

    Raises:
        ToolError: the tool or a thing that it names does not exist; nothing has changed.
        pydantic.ValidationError: the arguments are wrong.
    """
    if tool not in TOOLS or arguments is None:
        raise ToolError(f"there is no tool {tool!r}, or its arguments are not a JSON object")
    return TOOLS[tool].model_validate(arguments).do(office)
