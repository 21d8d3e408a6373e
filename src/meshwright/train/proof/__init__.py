"""meshwright.train.proof."""
