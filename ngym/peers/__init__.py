"""How does a service talk to another? `peers["policy"].post(path, body)`: discovery, deadline, capped retries, replicas.

What knows the HTTP client, which is `ngym.client`. Connect errors, 429 and 503 mean that the request was not processed
and are retried for every call; 500, 502 and 504 only for calls that are `idempotent`; a broken connection for these, and
for calls under an idempotency key, which the other side does once. Retries that cost the other side something are at most
half of what it answered of late, and ten.
"""

from ngym.peers.peer import Peer, PeerSession
from ngym.peers.peers import Peers

__all__ = ["Peer", "PeerSession", "Peers"]
