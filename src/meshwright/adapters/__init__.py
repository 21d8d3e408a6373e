"""Adapters that let the loop of another library train under a plan: the Trainer of transformers and Lightning."""
