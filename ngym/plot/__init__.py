"""Curves of training runs, read from metrics.jsonl: selection, smoothing, aggregation, text and picture output."""
