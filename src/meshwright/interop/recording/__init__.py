"""Records a few training steps of any engine, and compares the recording with one device.

`recorder.py` records, `reference.py` repeats the steps on one device, `judge.py` compares, and `causes.py` explains a
difference.
"""
