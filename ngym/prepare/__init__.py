"""How does a public set become rows of ours? Its files at a pinned revision, its records one by one, the rows (`ng_prepare`).

A set is declared beside its environment's data, in `data/NAME/prepare.py`, as a `PublicSet` in `SETS`.
"""

from ngym.prepare.sets import File, Made, Part, PublicSet, Unfit, calling, saying

__all__ = ["File", "Made", "Part", "PublicSet", "Unfit", "calling", "saying"]
