"""What the environment must say before torch makes a GPU's context: which allocator it has, and which workspaces.

    dropped   PYTORCH_CUDA_ALLOC_CONF, PYTORCH_ALLOC_CONF   plans are made for the default allocator
    set       CUBLAS_WORKSPACE_CONFIG=:4096:8               the same bits every time, for 32 MiB
              CUDA_MODULE_LOADING=LAZY                      a context without the kernels that nobody calls
              TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT=200        plans of kernels, 200 KB each in host memory

Harmless where there is no GPU. No torch.
"""

from __future__ import annotations

import logging
import os

__all__ = ["prepare"]

_log = logging.getLogger(__name__)

_DROPPED = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_SET = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_MODULE_LOADING": "LAZY",
    "TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT": "200",
}


def prepare() -> None:
    """Before torch is loaded, in every process that may train on an accelerator."""
    for name in _DROPPED:
        setting = os.environ.pop(name, None)
        if setting is not None:
            _log.warning("%s=%s is ignored: plans are made for the default allocator", name, setting[:200])
    for name, setting in _SET.items():
        os.environ.setdefault(name, setting)
