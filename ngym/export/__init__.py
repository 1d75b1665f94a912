"""Rollouts -> files that trainers read: demonstrations, preference pairs, KTO, ShareGPT, filtered rollouts (wire.md, section 5).

    scan         every row read once: a usable rollout becomes a Candidate (a few numbers), any other a count under its reason
    choose       candidates -> the rows to write, and why each other candidate was left out
    write        the chosen rows read again at their places, rendered, written aside and renamed

So a file of any size needs memory for its candidates only, about 400 bytes each. `ngym.export.run.export` is the way in.
"""
