"""An example MCP server for gym_servers/mcp: a shop with prices and a basket.

python gym_servers/mcp/example_server.py     # speaks MCP on its standard input and output
"""

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

PRICES = {"apple": 35, "bread": 320, "candle": 145, "lamp": 2399, "pear": 48, "rope": 780, "soap": 215, "teapot": 1865}

server = MCPServer("shop")
basket: dict[str, int] = {}  # each rollout has its own process, so its own basket


@server.tool()
def price(ware: str) -> int:
    """What one piece of a ware costs, in cents."""
    if ware not in PRICES:
        raise ToolError(f"unknown ware {ware!r}; known: {', '.join(PRICES)}")
    return PRICES[ware]


@server.tool()
def put(ware: str, pieces: int) -> str:
    """Put pieces of a ware into the basket."""
    cents = price(ware)
    if not 1 <= pieces <= 100:
        raise ToolError("1 to 100 pieces at a time")
    basket[ware] = basket.get(ware, 0) + pieces
    return f"{pieces} x {ware} at {cents} cents"


@server.tool()
def total() -> int:
    """What the basket costs, in cents."""
    return sum(PRICES[ware] * pieces for ware, pieces in basket.items())


if __name__ == "__main__":
    server.run("stdio")
