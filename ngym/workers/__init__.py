"""CPU-heavy checks in warm processes that can be killed at a deadline: `outcome = await pool.run(...)`."""

from ngym.workers.pool import WorkerPool
from ngym.workers.processes import Outcome

__all__ = ["Outcome", "WorkerPool"]
