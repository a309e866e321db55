"""What tensors hold while something runs: the most there ever was at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """A context. Sees every operation in it; memory mapped from files does not count.

    Attributes:
        peak: bytes of the tensors made in the context that were there at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and _key(t) not in given]
        if made:
            self._live = {k: held for k, held in self._live.items() if not held[0].expired()}
            for tensor in made:
                storage = tensor.untyped_storage()
                self._live[_key(tensor)] = (StorageWeakRef(storage), storage.nbytes())
            self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
