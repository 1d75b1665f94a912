"""ngym for people who live in notebooks: collect, look, verify, export, in a line each; `import ngym` has the names.

    services   ngym.run: the services of a config, up until they are stopped
    collecting ngym.collect_rollouts
    loading    ngym.load_rollouts
    rollouts   what both give: ngym.Rollouts
    verifying  ngym.verify
    exporting  ngym.export_rollouts
    training   ngym.training_metrics

A notebook has an event loop of its own and wants its signals back: whatever waits here runs on a loop in another thread
(background), and is cancelled, and its services stopped, when the waiting cell is interrupted.
"""
