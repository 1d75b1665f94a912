"""A model that is served elsewhere: what every back end over HTTP shares, whatever the other side speaks.

One `Upstream` a service: one pace (an adaptive concurrency limit, and pauses that all callers keep), one retry budget,
one account of tokens and money. A back end says which path and body, and what the answer means.
"""

from ngym.remote.options import RemoteOptions
from ngym.remote.problems import ContextOverflow, NotOffered, Site, Unanswered
from ngym.remote.upstream import Headers, Upstream, watched

__all__ = ["ContextOverflow", "Headers", "NotOffered", "RemoteOptions", "Site", "Unanswered", "Upstream", "watched"]
