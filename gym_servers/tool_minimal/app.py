"""tool_minimal: answer with the fewest calls. Rewards a right, looked-up answer, and few calls."""

from __future__ import annotations

import random
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, TypeAdapter, field_validator

from ngym import Session, ToolError, VerifyRequest, gym_server
from ngym.grading.answers import number, same_number
from ngym.rollout import Call, calls_in
from ngym.services.gym.server import ReferenceText

MATERIALS = ["copper", "oak", "glass", "steel", "wool", "clay", "linen", "brass", "cedar", "marble"]
THINGS = ["lamp", "chair", "kettle", "basket", "mirror", "clock", "vase", "blanket", "stool", "tray"]
CITIES = ["Velden", "Norrby", "Castrel", "Hallin", "Ostmark", "Perrin", "Quillan", "Tarvos"]
FIRMS = ["Arlo", "Bexley", "Corvin", "Dunmore", "Elster", "Fenwick", "Garrow", "Halden"]
AISLES = 5
WARES = 24
TOOLS = {
    "find_ware": "name",
    "get_ware": "sku",
    "list_aisle": "aisle",
    "list_supplied": "supplier_id",
    "get_supplier": "supplier_id",
    "get_freight": "city",
    "get_reviews": "sku",
}


class Ware(NamedTuple):
    sku: str
    name: str
    aisle: str
    price: int
    stock: int
    supplier_id: str


class Supplier(NamedTuple):
    supplier_id: str
    name: str
    city: str
    lead_days: int


class CallResult(NamedTuple):
    """The result of a call: its output, the facts it reveals, and the arguments that later calls can take from it."""

    output: Any
    facts: frozenset[str]
    handles: frozenset[tuple[str, str]]


class World:
    """Wares by SKU, suppliers by id, freight by city. The same seed is the same world."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"tool_minimal {seed}")
        self.freight = {city: rng.randint(11, 199) for city in CITIES}
        ids = rng.sample(range(100, 1000), len(FIRMS))
        self.suppliers = {
            f"S-{number}": Supplier(f"S-{number}", firm, rng.choice(CITIES), rng.randint(2, 45))
            for number, firm in zip(ids, FIRMS, strict=True)
        }
        self.aisles = [f"{rng.choice('ABCDEFGH')}{number}" for number in rng.sample(range(10, 100), AISLES)]
        names = rng.sample([f"{material} {thing}" for material in MATERIALS for thing in THINGS], WARES)
        self.wares = {}
        for code, name in zip(rng.sample(range(1000, 10_000), WARES), names, strict=True):
            shelf, supplier = rng.choice(self.aisles), rng.choice(list(self.suppliers))
            ware = Ware(f"K-{code}", name, shelf, rng.randint(103, 9899), rng.randint(13, 998), supplier)
            self.wares[ware.sku] = ware

    def call(self, tool: str, key: str) -> CallResult | None:
        """The tool's result for this argument, or None if there is no such thing."""
        result: CallResult | None = getattr(self, f"_{tool}")(key) if tool in TOOLS else None
        return result

    def _find_ware(self, name: str) -> CallResult | None:
        normalized = " ".join(name.casefold().split())
        ware = next((ware for ware in self.wares.values() if ware.name == normalized), None)
        return ware and CallResult({"sku": ware.sku}, frozenset({f"sku {ware.name}"}), frozenset({("sku", ware.sku)}))

    def _get_ware(self, sku: str) -> CallResult | None:
        ware = self.wares.get(sku)
        if ware is None:
            return None
        handles = {("name", ware.name), ("aisle", ware.aisle), ("supplier_id", ware.supplier_id)}
        facts = {f"price {sku}", f"stock {sku}", f"supplier {sku}"}
        return CallResult(ware._asdict(), frozenset(facts), frozenset(handles))

    def _list_aisle(self, aisle: str) -> CallResult | None:
        wares = [ware for ware in self.wares.values() if ware.aisle == aisle]
        output = [{"sku": ware.sku, "name": ware.name, "price": ware.price} for ware in wares]
        return self._several(output, wares, "price", f"aisle {aisle}") if wares else None

    def _list_supplied(self, supplier_id: str) -> CallResult | None:
        wares = [ware for ware in self.wares.values() if ware.supplier_id == supplier_id]
        output = [{"sku": ware.sku, "name": ware.name, "stock": ware.stock} for ware in wares]
        return self._several(output, wares, "stock", f"supplied {supplier_id}") if wares else None

    def _several(self, output: Any, wares: list[Ware], column: str, whole: str) -> CallResult:
        facts = {whole} | {f"{column} {ware.sku}" for ware in wares} | {f"sku {ware.name}" for ware in wares}
        return CallResult(output, frozenset(facts), frozenset(("sku", ware.sku) for ware in wares))

    def _get_supplier(self, supplier_id: str) -> CallResult | None:
        supplier = self.suppliers.get(supplier_id)
        if supplier is None:
            return None
        facts = frozenset({f"city {supplier_id}", f"lead {supplier_id}"})
        return CallResult(supplier._asdict(), facts, frozenset({("city", supplier.city)}))

    def _get_freight(self, city: str) -> CallResult | None:
        cost = self.freight.get(city.strip().title())
        return (
            None
            if cost is None
            else CallResult({"freight": cost}, frozenset({f"freight {city.strip().title()}"}), frozenset())
        )

    def _get_reviews(self, sku: str) -> CallResult | None:
        if sku not in self.wares:
            return None
        rng = random.Random(sku)
        return CallResult({"stars": rng.randint(1, 5), "reviews": rng.randint(0, 400)}, frozenset(), frozenset())


"""Each tool and the name of its one argument."""


@lru_cache(maxsize=1024)
def world(seed: int) -> World:
    return World(seed)


CORRECT, EFFICIENT = 0.6, 0.4
SEED = TypeAdapter(int)  # a session has the row as it was sent: 5.0 and "5" are the world 5


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


def _run_tool(tool: str, body: BaseModel, session: Session) -> Any:
    arguments = body.model_dump()
    session.setdefault("calls", []).append(Call(tool, arguments))
    result = None
    if "task" in session:
        result = world(SEED.validate_python(session["task"]["world"])).call(tool, arguments[TOOLS[tool]])
    if result is None:
        raise ToolError(f"{tool}: there is no {TOOLS[tool]} {arguments[TOOLS[tool]][:60]!r}")
    return result.output


async def find_ware(body: Name, session: Session) -> Any:
    """The SKU of the ware with this name."""
    return _run_tool("find_ware", body, session)


async def get_ware(body: Sku, session: Session) -> Any:
    """A ware's name, aisle, price, stock and supplier."""
    return _run_tool("get_ware", body, session)


async def list_aisle(body: Aisle, session: Session) -> Any:
    """All wares of an aisle, with their prices."""
    return _run_tool("list_aisle", body, session)


async def list_supplied(body: SupplierId, session: Session) -> Any:
    """All wares of a supplier, with their stock."""
    return _run_tool("list_supplied", body, session)


async def get_supplier(body: SupplierId, session: Session) -> Any:
    """A supplier's name, city and lead time in days."""
    return _run_tool("get_supplier", body, session)


async def get_freight(body: City, session: Session) -> Any:
    """The cost of freight from a city."""
    return _run_tool("get_freight", body, session)


async def get_reviews(body: Sku, session: Session) -> Any:
    """What customers think of a ware."""
    return _run_tool("get_reviews", body, session)


def verify(task: Task, session: Session) -> dict[str, Any]:
    # An SDK-driven agent has no calls in its trajectory, a stored rollout has no session: use the longer list.
    calls = max(calls_in(task.response), session.get("calls", []), key=len)
    results = [world(task.world).call(call.name, _key(call)) for call in calls]
    known = frozenset[str]().union(*(result.facts for result in results if result))
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
        "failed_calls": results.count(None),
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
