"""CPU-heavy checks in warm processes that can be killed at a deadline: `outcome = await pool.run(...)`."""

from ngym.workers.pool import WorkerOutcome, WorkerPool

__all__ = ["WorkerOutcome", "WorkerPool"]
