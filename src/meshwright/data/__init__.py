"""Which sample each rank reads: the same order under every plan. From text, token arrays or drawn images to batches of
tensors."""
