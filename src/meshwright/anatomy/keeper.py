"""Who keeps what autograd needs for backward at this moment: a model's own code may take that on, as torch.utils.checkpoint does, and call parts of it again."""

from __future__ import annotations

from typing import Any

import torch

AGAIN = "runs inside a checkpoint of the model's own, which calls it again in backward (turn that off and let the plan recompute: rc-full)"


def keeper() -> Any:
    """None where autograd does itself. Private to torch: tests of models that checkpoint themselves fail when it moves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def recording() -> tuple[Any, bool]:
    """Who keeps it, and whether there is anything to keep: inside a checkpoint of the model's own it is another, or nothing."""
    return keeper(), torch.is_grad_enabled()
