"""The build: an ordered list of passes that turns a model and a plan into an engine."""
