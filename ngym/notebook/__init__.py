"""The Python API for notebooks: collect, inspect, verify and export rollouts; `import ngym` has the names.

    services      ngym.run: the services of a config, until they are stopped
    collecting    ngym.collect_rollouts
    rollouts      ngym.load_rollouts; ngym.Rollouts, the result of both
    verifying     ngym.verify
    exporting     ngym.export_rollouts
    frames        ngym.training_metrics; data frames and HTML

A notebook has its own event loop and signal handlers: blocking calls run on a loop in another thread (services). When
the waiting cell is interrupted, they are cancelled, and their services are stopped.
"""
