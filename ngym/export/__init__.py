"""Exports rollouts as training files: demonstrations, preference pairs, KTO, ShareGPT, filtered rollouts.

    scan      reads every row once: a usable rollout becomes a Candidate (a few numbers), others are counted by reason
    choose    selects the rows to write, and counts why each other candidate is left out
    write     reads the chosen rows again, renders them, and writes the file atomically

So a file of any size only needs memory for its candidates, about 400 bytes each. The entry point is
`ngym.export.exporter.export`.
"""
