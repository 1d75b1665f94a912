"""A shop generated from a seed: wares, suppliers, cities. Each tool call reveals facts, and a fact has one name."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any, NamedTuple

MATERIALS = ["copper", "oak", "glass", "steel", "wool", "clay", "linen", "brass", "cedar", "marble"]
THINGS = ["lamp", "chair", "kettle", "basket", "mirror", "clock", "vase", "blanket", "stool", "tray"]
CITIES = ["Velden", "Norrby", "Castrel", "Hallin", "Ostmark", "Perrin", "Quillan", "Tarvos"]
FIRMS = ["Arlo", "Bexley", "Corvin", "Dunmore", "Elster", "Fenwick", "Garrow", "Halden"]
AISLES = 5
WARES = 24


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


class Seen(NamedTuple):
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
        for number, name in zip(rng.sample(range(1000, 10_000), WARES), names, strict=True):
            shelf, supplier = rng.choice(self.aisles), rng.choice(list(self.suppliers))
            ware = Ware(f"K-{number}", name, shelf, rng.randint(103, 9899), rng.randint(13, 998), supplier)
            self.wares[ware.sku] = ware

    def call(self, tool: str, key: str) -> Seen | None:
        """The tool's result for this argument, or None if there is no such thing."""
        shown: Seen | None = getattr(self, f"_{tool}")(key) if tool in TOOLS else None
        return shown

    def _find_ware(self, name: str) -> Seen | None:
        wanted = " ".join(name.casefold().split())
        ware = next((ware for ware in self.wares.values() if ware.name == wanted), None)
        return ware and Seen({"sku": ware.sku}, frozenset({f"sku {ware.name}"}), frozenset({("sku", ware.sku)}))

    def _get_ware(self, sku: str) -> Seen | None:
        ware = self.wares.get(sku)
        if ware is None:
            return None
        handles = {("name", ware.name), ("aisle", ware.aisle), ("supplier_id", ware.supplier_id)}
        facts = {f"price {sku}", f"stock {sku}", f"supplier {sku}"}
        return Seen(ware._asdict(), frozenset(facts), frozenset(handles))

    def _list_aisle(self, aisle: str) -> Seen | None:
        found = [ware for ware in self.wares.values() if ware.aisle == aisle]
        output = [{"sku": ware.sku, "name": ware.name, "price": ware.price} for ware in found]
        return self._several(output, found, "price", f"aisle {aisle}") if found else None

    def _list_supplied(self, supplier_id: str) -> Seen | None:
        found = [ware for ware in self.wares.values() if ware.supplier_id == supplier_id]
        output = [{"sku": ware.sku, "name": ware.name, "stock": ware.stock} for ware in found]
        return self._several(output, found, "stock", f"supplied {supplier_id}") if found else None

    def _several(self, output: Any, found: list[Ware], column: str, whole: str) -> Seen:
        facts = {whole} | {f"{column} {ware.sku}" for ware in found} | {f"sku {ware.name}" for ware in found}
        return Seen(output, frozenset(facts), frozenset(("sku", ware.sku) for ware in found))

    def _get_supplier(self, supplier_id: str) -> Seen | None:
        supplier = self.suppliers.get(supplier_id)
        if supplier is None:
            return None
        facts = frozenset({f"city {supplier_id}", f"lead {supplier_id}"})
        return Seen(supplier._asdict(), facts, frozenset({("city", supplier.city)}))

    def _get_freight(self, city: str) -> Seen | None:
        cost = self.freight.get(city.strip().title())
        return (
            None
            if cost is None
            else Seen({"freight": cost}, frozenset({f"freight {city.strip().title()}"}), frozenset())
        )

    def _get_reviews(self, sku: str) -> Seen | None:
        if sku not in self.wares:
            return None
        rng = random.Random(sku)
        return Seen({"stars": rng.randint(1, 5), "reviews": rng.randint(0, 400)}, frozenset(), frozenset())


TOOLS = {
    "find_ware": "name",
    "get_ware": "sku",
    "list_aisle": "aisle",
    "list_supplied": "supplier_id",
    "get_supplier": "supplier_id",
    "get_freight": "city",
    "get_reviews": "sku",
}
"""Each tool and the name of its one argument."""


@lru_cache(maxsize=1024)
def world(seed: int) -> World:
    return World(seed)
