"""Converts public sets to rows for `ng_prepare`: downloads files at a pinned revision, reads records, converts and
checks them.

A set is declared next to its environment's data, in `gym_servers/NAME/data/prepare.py`, as a `PublicSet` in `SETS`.
"""

from ngym.prepare.sets import File, Made, Part, PublicSet, Split, Unfit, calling, saying

__all__ = ["File", "Made", "Part", "PublicSet", "Split", "Unfit", "calling", "saying"]
