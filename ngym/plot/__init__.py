"""The curves of training runs: read from metrics.jsonl, chosen, smoothed, aggregated over seeds; as text or as a picture."""
