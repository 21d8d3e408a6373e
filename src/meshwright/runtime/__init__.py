"""The distributed runtime. It turns a PyTorch model and a plan into an engine, with which `train/` runs training steps.
build/parallelize.py lists the build passes in order."""
