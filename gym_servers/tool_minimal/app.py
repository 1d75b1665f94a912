"""tool_minimal: answer with the fewest calls. Rewards a right, looked-up answer, and few calls."""

from decimal import Decimal, InvalidOperation
from typing import Any

from pydantic import BaseModel, Field, field_validator

from ngym import Session, ToolError, VerifyRequest, gym_server
from ngym.grading.answers import number, same_number
from ngym.rollout import Call, calls_in
from ngym.services.gym.server import ReferenceText

from .world import CITIES, TOOLS, world

CORRECT, EFFICIENT = 0.6, 0.4


class Name(BaseModel):
    name: str = Field(description="The ware's full name, such as 'oak chair'.")


class Sku(BaseModel):
    sku: str = Field(description="Such as K-1234.")


class Aisle(BaseModel):
    aisle: str = Field(description="Such as B42.")


class SupplierId(BaseModel):
    supplier_id: str = Field(description="Such as S-123.")


class City(BaseModel):
    city: str


class Task(VerifyRequest):
    world: int
    needs: list[ReferenceText] = Field(description="The facts that the answer depends on.")
    minimal_calls: int
    expected_answer: ReferenceText = Field(description="A number, or a city.")

    @field_validator("expected_answer")
    @classmethod
    def _can_be_compared(cls, expected: str) -> str:
        try:
            compared = expected in CITIES or Decimal(expected).is_finite()
        except InvalidOperation:
            compared = False
        if not compared:
            raise ValueError("must be a number or one of the cities")
        return expected


def _look(tool: str, body: BaseModel, session: Session) -> Any:
    arguments = body.model_dump()
    session.setdefault("calls", []).append(Call(tool, arguments))
    seen = world(session["task"]["world"]).call(tool, arguments[TOOLS[tool]]) if "task" in session else None
    if seen is None:
        raise ToolError(f"{tool}: there is no {TOOLS[tool]} {arguments[TOOLS[tool]][:60]!r}")
    return seen.output


async def find_ware(body: Name, session: Session) -> Any:
    """The SKU of the ware with this name."""
    return _look("find_ware", body, session)


async def get_ware(body: Sku, session: Session) -> Any:
    """A ware's name, aisle, price, stock and supplier."""
    return _look("get_ware", body, session)


async def list_aisle(body: Aisle, session: Session) -> Any:
    """All wares of an aisle, with their prices."""
    return _look("list_aisle", body, session)


async def list_supplied(body: SupplierId, session: Session) -> Any:
    """All wares of a supplier, with their stock."""
    return _look("list_supplied", body, session)


async def get_supplier(body: SupplierId, session: Session) -> Any:
    """A supplier's name, city and lead time in days."""
    return _look("get_supplier", body, session)


async def get_freight(body: City, session: Session) -> Any:
    """The cost of freight from a city."""
    return _look("get_freight", body, session)


async def get_reviews(body: Sku, session: Session) -> Any:
    """What customers think of a ware."""
    return _look("get_reviews", body, session)


def verify(task: Task, session: Session) -> dict[str, Any]:
    # An SDK-driven agent has no calls in its trajectory, a stored rollout has no session: use the longer list.
    calls = max(calls_in(task.response), session.get("calls", []), key=len)
    seen = [world(task.world).call(call.name, _key(call)) for call in calls]
    known = frozenset[str]().union(*(shown.facts for shown in seen if shown))
    answer = _answer(task.text, task.expected_answer)
    right = answer is not None and _same(answer, task.expected_answer)
    looked_up = known >= set(task.needs)
    efficiency = min(1.0, (task.minimal_calls + 1) / (len(calls) + 1))  # at most 1, also after a lucky guess
    parts = {"correctness": CORRECT, "efficiency": EFFICIENT * efficiency}
    if not (right and looked_up):
        parts = dict.fromkeys(parts, 0.0)
    return {
        "reward": sum(parts.values()),
        "reward_components": parts,
        "extracted_answer": answer,
        "right": right,
        "looked_up": looked_up,
        "calls": len(calls),
        "failed_calls": seen.count(None),
        "repeated_calls": len(calls) - len({(call.name, _key(call)) for call in calls}),
    }


def _key(call: Call) -> str:
    return str((call.arguments or {}).get(TOOLS.get(call.name, ""), ""))


def _answer(text: str, expected: str) -> str | None:
    """The last number of the text, or its only city."""
    if expected in CITIES:
        named = [city for city in CITIES if city.casefold() in text.casefold()]
        return named[0] if len(named) == 1 else None
    found = number(text)
    return None if found is None else str(found)


def _same(answer: str, expected: str) -> bool:
    return answer == expected if expected in CITIES else same_number(Decimal(answer), Decimal(expected))


app = gym_server(
    tools=[find_ware, get_ware, list_aisle, list_supplied, get_supplier, get_freight, get_reviews],
    verify=verify,
    replays=True,
)
