"""Simulates training over time: one step of a plan with stragglers and slow links, and months with device failures."""
