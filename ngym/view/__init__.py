"""Rollout files and training runs in a browser: what the policy did, and why it got its reward.

runs       what was opened           index      one run's rows as an SQLite index that follows the files
scan       a range of a file -> records, in this process or a helper
query      the filter language -> SQL, and text by a scan
rows       pages, groups and tasks   stats      a run in numbers; two runs, task by task
tokens     segments, for people      training   metrics and recipes of training runs
app        the web application       export     one self-contained page
"""
