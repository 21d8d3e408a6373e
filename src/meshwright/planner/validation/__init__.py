"""Compares the cost model with published measurements, for `meshwright validate`: converts each row of a table to a job
and a plan, predicts its time and memory, and scores the predictions by source."""
