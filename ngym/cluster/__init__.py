"""Runs over several machines: the engine that places services with Ray, and the files that `ng_submit` renders."""
