"""Plans, estimates and records for people: tables of plans, a run as text, several runs side by side. No torch."""
