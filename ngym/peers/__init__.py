"""Calls between services, `peers["policy"].post(path, body)`: discovery, deadlines, retries and replicas.

Only this package uses the HTTP client `ngym.client`. Connect errors, 429 and 503 mean that the request was not
processed; they are retried for every call. 500, 502 and 504 are retried for `idempotent` calls; a broken connection for
those and for calls with an idempotency key, which the service processes once. Retries that cost the service work are
limited to half of its recent successful answers, plus ten.
"""

from ngym.peers.peer import Peer, PeerSession
from ngym.peers.peers import Peers

__all__ = ["Peer", "PeerSession", "Peers"]
