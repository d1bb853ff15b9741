"""PyTorch's private operators that decoder/ calls. Each is None in a PyTorch that lacks it; then
something slower computes the same.

| operator | without it |
|---|---|
| ONEDNN_LINEAR, ONEDNN_PACK, ONEDNN_HAS_BF16 | a CPU's products are PyTorch's own, mostly by MKL |
| LSTM_CELL | an LSTM cell on a GPU is nine kernels instead of one |
| SOFTMAX_BACKWARD | the gradient of a softmax is three operations |
| COPY_ALL | graphs copy each tensor by a launch of its own |
| KEEPS_GRAPH | every backward copies what it could overwrite (PyTorch 2.4 lacks it) |
"""

from typing import Any

import torch


def find(path: str) -> Any:
    """Returns what ``torch`` has under a dotted name; None if it has none."""
    found = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


ONEDNN_LINEAR = find("ops.mkldnn._linear_pointwise")
ONEDNN_PACK = find("ops.mkldnn._reorder_linear_weight")
ONEDNN_HAS_BF16 = find("ops.mkldnn._is_mkldnn_bf16_supported")
LSTM_CELL = find("ops.aten._thnn_fused_lstm_cell")
SOFTMAX_BACKWARD = find("ops.aten._softmax_backward_data.out")
COPY_ALL = find("_foreach_copy_")
KEEPS_GRAPH = find("_C._autograd._get_current_graph_task_keep_graph")
