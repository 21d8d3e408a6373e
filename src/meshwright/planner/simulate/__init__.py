"""Simulates discrete events: one step with stragglers and slow links, and months of a fleet with failures."""
