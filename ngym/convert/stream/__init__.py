"""Streams of events and chunks."""
