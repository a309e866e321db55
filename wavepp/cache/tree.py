"""PrefixTree: which prompts' blocks are held, and where. A radix tree of runs of blocks.

Owns the nodes and keeps the pools' `owner` and `depth` and the hint index equal to them; knows
nothing of pins. A node is
a run, split only where prompts part:

    start            start + length          (in blocks from the beginning of the prompt)
      |-- tokens ------|                     raw: length * B int32 tokens
      |-- keys --------|                     one a block, for the hint index
      |-- places[g] ---|                     unit id of group g for each block, -1: not held

A recurrent group's "block" i is the snapshot that hangs on the boundary after block i. Any block
may be a hole (evicted, or outside a window); a node goes when nothing is left in it. Tokens are
compared on every walk.

A cursor (node, depth) names a position on a path. A split keeps the lower part in the old node, so
climbing to the parent until `start < depth` always finds the position again; a run that is gone
still knows its parent, for cursors that end above it. Paper, section on admission (walks).

A walk needs no mutex as long as what it found is used only while `changes` stands where it stood
before the walk: every change counts when it is complete, so a walk that met half of one does not
pass for a good one. For that a walk reads each field of a run once, and never fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import numpy as np

from wavepp.cache.blocks import BlockPool
from wavepp.cache.hints import HintIndex
from wavepp.cache.lru import as_index
from wavepp.cache.types import TOKEN_BYTES, Int32Array, IntArray, Prompt

FEW_BLOCKS = 32  # up to here plain steps are faster than vector ones


class Node:
    """One run. Only the tree changes it."""

    __slots__ = ("alive", "children", "index", "keys", "parent", "places", "raw", "shard", "start")

    def __init__(self, parent: Node | None, start: int, raw: bytes, places: Int32Array) -> None:
        self.parent = parent
        self.start = start
        self.raw = raw
        self.places = places
        self.keys: list[bytes] = []
        self.children: dict[bytes, Node] = {}
        self.index = -1
        self.shard = 0
        self.alive = True

    @property
    def length(self) -> int:
        """Blocks in this run."""
        return int(self.places.shape[1])

    @property
    def end(self) -> int:
        """Blocks from the beginning of the prompt to the end of this run."""
        return self.start + int(self.places.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The longest held path of a prompt: `places` is int32 [groups, depth]."""

    node: Node | None
    depth: int
    places: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class Attached:
    """Result of an attach: the cursor at its end, and for each group the older device units that
    were kept."""

    node: Node
    count: int
    older: list[Int32Array]


class PrefixTree:
    """All paths of one stage, one root a namespace."""

    def __init__(self, block_size: int, pools: Sequence[BlockPool], hints: HintIndex) -> None:
        self._step = block_size * TOKEN_BYTES
        self._block_size = block_size
        self._pools = tuple(pools)
        self._hints = hints
        self.roots: dict[bytes, Node] = {}
        self.nodes: dict[int, Node] = {}
        self.changes = 0
        self._next_index = 0

    # -- reading ---------------------------------------------------------------------------------

    def walk(self, prompt: Prompt, limit: int) -> Match:
        """The longest path <= limit blocks whose tokens equal the prompt's. Changes nothing, and
        does not fail when another thread changes the tree meanwhile."""
        node = self.roots.get(prompt.namespace)
        raw, step = prompt.raw, self._step
        at, end = 0, limit * step  # in bytes of raw
        parts: list[Int32Array] = []
        while node is not None and at < end:
            child = node.children.get(raw[at : at + step])
            if child is None:
                break
            node, theirs = child, child.raw
            if at + len(theirs) > end or not raw.startswith(theirs, at):
                matched = self._common(theirs, raw, at // step, (end - at) // step)
                parts.append(child.places[:, :matched])
                at += matched * step
                break
            parts.append(child.places)
            at += len(theirs)
        return Match(node if at else None, at // step, self._join(parts))

    def _common(self, run: bytes, raw: bytes, depth: int, limit: int) -> int:
        """Leading blocks of a run that equal the prompt's from `depth` on, at most `limit`."""
        count = min(len(run) // self._step, limit)
        ours = np.frombuffer(raw, np.int32, count * self._block_size, depth * self._step)
        theirs = np.frombuffer(run, np.int32, count * self._block_size)
        differ = np.flatnonzero(ours != theirs)
        return int(differ[0]) // self._block_size if len(differ) else count

    def path(self, node: Node | None, depth: int) -> Int32Array:
        """int32 [groups, depth]: the units on the path that ends at the cursor."""
        while node is not None and node.start >= depth and node.parent is not None:
            node = node.parent
        if node is None or node.parent is None:
            return self._join([])
        parts = [node.places[:, : depth - node.start]]
        node = node.parent
        while node.parent is not None:
            parts.append(node.places)
            node = node.parent
        parts.reverse()
        return self._join(parts)

    def climb(self, node: Node, depth: int) -> Node:
        """The node that holds block depth - 1, from a node at or below it."""
        while node.start >= depth and node.parent is not None:
            node = node.parent
        assert node.alive, "a cursor's run is gone"
        assert node.start < depth <= node.end, (node.start, depth, node.end)
        return node

    def valid(self, node: Node | None, depth: int, prompt: Prompt) -> bool:
        """Whether the cursor still names this prompt's position, though nothing there is pinned.

        What lies above a living run never changes; its own end may have been cut off and
        grown again with other tokens, so those are compared.
        """
        if node is None:
            return False
        while node.start >= depth and node.parent is not None:
            node = node.parent
        if not node.alive or not node.start < depth <= node.end:
            return False
        ours = node.raw if depth == node.end else node.raw[: (depth - node.start) * self._step]
        return prompt.raw.startswith(ours, node.start * self._step)

    def _join(self, parts: list[Int32Array]) -> Int32Array:
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return np.empty((len(self._pools), 0), dtype=np.int32)
        return np.concatenate(parts, axis=1)

    def unit_at(self, node: Node | None, depth: int, group: int) -> int:
        """What a group holds for block depth - 1 of a cursor's path; -1: nothing, or the run is
        gone."""
        while node is not None and node.start >= depth and node.parent is not None:
            node = node.parent
        if node is None or not node.alive or not node.start < depth <= node.end:
            return -1
        return int(node.places[group, depth - 1 - node.start])

    # -- growing ---------------------------------------------------------------------------------

    def attach(
        self, cursor: tuple[Node | None, int], prompt: Prompt, places: Int32Array
    ) -> Attached:
        """Attaches units below a cursor; what is there already stays (a host copy gives way to a
        device one).

        Args:
            cursor: where the blocks begin: (node that holds the block before, its depth in
            blocks); (None, 0). places: int32 [groups, k], k >= 1; -1 where the group has nothing
            to attach.
        """
        node, depth = cursor
        node = (
            self._root(prompt.namespace) if node is None or depth == 0 else self.climb(node, depth)
        )
        upto = depth + places.shape[1]
        older: list[list[Int32Array]] = [[] for _ in self._pools]
        count = 0
        while depth < upto:
            if depth == node.end and not self._is_open(node):
                found = node.children.get(prompt.raw[depth * self._step : (depth + 1) * self._step])
                node = found if found is not None else self._sprout(node, depth)
            rest = places[:, places.shape[1] - (upto - depth) :]
            inside = depth - node.start
            if inside == node.length:
                self._extend(node, prompt, upto)
                matched = upto - depth
            else:
                matched = self._overlap(node, prompt, depth, upto)
            count += self._fill(node, inside, rest[:, :matched], older)
            depth += matched
            if depth < upto and depth < node.end:
                node = self._split(node, depth)
        self.changes += 1
        merged = [joined_or_empty(lists) for lists in older]
        return Attached(node, count, merged)

    def _is_open(self, node: Node) -> bool:
        """Whether the run may simply grow: nothing parts at its end."""
        return node.parent is not None and not node.children

    def _root(self, namespace: bytes) -> Node:
        root = self.roots.get(namespace)
        if root is None:
            root = Node(None, 0, b"", np.empty((len(self._pools), 0), dtype=np.int32))
            self.roots[namespace] = root
        return root

    def _sprout(self, parent: Node, depth: int) -> Node:
        """A new empty run below `parent`; `_extend` fills it and hangs it in."""
        assert depth == parent.end, (depth, parent.end)
        node = Node(parent, depth, b"", np.empty((len(self._pools), 0), dtype=np.int32))
        self._register(node)
        return node

    def _register(self, node: Node) -> None:
        node.index = self._next_index
        self._next_index += 1
        self.nodes[node.index] = node

    def _extend(self, node: Node, prompt: Prompt, upto: int) -> None:
        """Lengthens a run to `upto` blocks with holes."""
        start, old_end = node.start, node.end
        if old_end == start:
            assert node.parent is not None
            node.parent.children[prompt.raw[start * self._step : (start + 1) * self._step]] = node
            node.shard = self._hints.shard_of(prompt.keys[0])
        node.raw = prompt.raw[start * self._step : upto * self._step]
        node.keys.extend(prompt.keys[old_end:upto])
        holes = np.full((len(self._pools), upto - old_end), -1, dtype=np.int32)
        node.places = np.concatenate([node.places, holes], axis=1)

    def _overlap(self, node: Node, prompt: Prompt, depth: int, upto: int) -> int:
        """Blocks of a run from `depth` on that equal the prompt's; at least one."""
        inside = depth - node.start
        count = min(node.end, upto) - depth
        size = self._block_size
        ours = np.frombuffer(prompt.raw, np.int32, count * size, depth * self._step)
        theirs = np.frombuffer(node.raw, np.int32, count * size, inside * self._step)
        differ = np.flatnonzero(ours != theirs)
        if len(differ):
            count = int(differ[0]) // size
        if count == 0:
            assert inside > 0, "a child was found by its first block"
        return count

    def _fill(
        self, node: Node, inside: int, ours: Int32Array, older: list[list[Int32Array]]
    ) -> int:
        """Puts units into the holes of a run; returns how many were attached."""
        attached = 0
        for group, pool in enumerate(self._pools):
            row = ours[group]
            held = row >= 0
            if not held.any():
                continue
            there = node.places[group, inside : inside + len(row)]
            on_host = held & (there >= pool.units)
            if on_host.any():
                self._replace_host(group, node, there[on_host], row[on_host])
            new = held & (there < 0)
            older[group].append(there[held & ~new & ~on_host])
            offsets = np.flatnonzero(new) + inside
            self._put(node, group, offsets, row[new])
            attached += len(offsets) + int(np.count_nonzero(on_host))
        return attached

    def _put(self, node: Node, group: int, offsets: IntArray, ids: Int32Array) -> None:
        if not len(ids):
            return
        pool = self._pools[group]
        node.places[group, offsets] = ids
        pool.owner[ids] = node.index
        pool.depth[ids] = offsets + node.start
        self._hints.add(node.shard, group, pick(node.keys, offsets))

    def _replace_host(self, group: int, node: Node, host: Int32Array, device: Int32Array) -> None:
        """A computed block takes the place of its copy on the host, with all its pins."""
        pool = self._pools[group]
        node.places[group, pool.depth[host] - node.start] = device
        ours = pool.pins[device].copy()
        pool.leave_host_order(host)
        pool.move(host, device)
        pool.pins[device] += ours
        pool.give(host[~pool.victim[host]])

    def _split(self, node: Node, depth: int) -> Node:
        """Cuts a run at `depth`; the new upper part is returned, the lower part keeps the node."""
        at = depth - node.start
        assert 0 < at < node.length, (at, node.length)
        assert node.parent is not None
        upper = Node(
            node.parent, node.start, node.raw[: at * self._step], node.places[:, :at].copy()
        )
        upper.keys, node.keys = node.keys[:at], node.keys[at:]
        upper.shard = node.shard
        self._register(upper)
        node.parent.children[upper.raw[: self._step]] = upper
        node.parent, node.start = upper, depth
        node.raw, node.places = node.raw[at * self._step :], node.places[:, at:].copy()
        upper.children[node.raw[: self._step]] = node
        for pool, row in zip(self._pools, upper.places, strict=True):
            pool.owner[row[row >= 0]] = upper.index
        return upper

    # -- shrinking -------------------------------------------------------------------------------

    def detach(self, group: int, ids: Int32Array) -> None:
        """Takes units out of the tree. They hold nothing afterwards; the caller reuses them."""
        if not len(ids):
            return
        gone: dict[int, list[bytes]] = {}
        for node, offsets, _ in self._by_node(group, ids):
            keys = gone.setdefault(node.shard, [])
            if isinstance(offsets, int):
                self._empty_one(node, group, offsets, keys)
                continue
            node.places[group][offsets] = -1
            keys.extend(pick(node.keys, offsets))
            if not node.children:
                self._tidy(node)
        for shard, keys in gone.items():
            self._hints.remove_later(shard, group, keys)
        self._pools[group].owner[as_index(ids)] = -1
        self.changes += 1

    def _empty_one(self, node: Node, group: int, offset: int, keys: list[bytes]) -> None:
        """Takes one unit out of a run. Runs of a single unit can be many: they just go."""
        keys.append(node.keys[offset])
        if len(self._pools) == 1 and len(node.keys) == 1 and not node.children:
            parent = self._unhang(node)
            if not parent.children:
                self._tidy(parent)
            return
        node.places[group, offset] = -1
        if not node.children:
            self._tidy(node)

    def relocate(self, group: int, source: Int32Array, target: Int32Array) -> None:
        """Moves content between units of a group (device and host): same place, same pins, other
        ids."""
        for node, offsets, chosen in self._by_node(group, source):
            node.places[group, offsets] = target[chosen]
        self._pools[group].move(source, target)
        self.changes += 1

    def _by_node(
        self, group: int, ids: Int32Array
    ) -> Iterator[tuple[Node, int | IntArray, int | IntArray | slice]]:
        """Attached units by node: (node, their offsets in it, their indices in ids); plain numbers
        where there is one unit."""
        pool = self._pools[group]
        at = as_index(ids)
        owners = pool.owner[at]
        assert owners.min(initial=0) >= 0, f"{pool.spec.name}: a unit is not in the tree"
        if len(ids) and (owners == owners[0]).all():
            node = self.nodes[int(owners[0])]
            yield node, pool.depth[at] - node.start, slice(None)
            return
        order = np.argsort(owners, kind="stable")
        owners, depths = owners[order], pool.depth[at[order]]
        cuts = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(ids)]
        firsts, first_places = depths[cuts[:-1]].tolist(), order[cuts[:-1]].tolist()
        names = owners[cuts[:-1]].tolist()
        for run, (low, high) in enumerate(pairwise(cuts)):
            node = self.nodes[names[run]]
            if high - low == 1:
                yield node, firsts[run] - node.start, first_places[run]
            else:
                yield node, depths[low:high] - node.start, order[low:high]

    def _tidy(self, node: Node) -> None:
        """Cuts what holds nothing off the end of a path, up to the first run that holds
        something."""
        current = node
        while not current.children:
            if current.parent is None:
                self._drop_root(current)
                return
            length = _held_length(current.places)
            if length == current.length:
                return
            if length:
                current.places = current.places[:, :length].copy()
                current.raw = current.raw[: length * self._step]
                del current.keys[length:]
                return
            current = self._unhang(current)

    def _drop_root(self, root: Node) -> None:
        root.alive = False
        self.roots = {name: other for name, other in self.roots.items() if other is not root}

    def _unhang(self, node: Node) -> Node:
        parent = node.parent
        assert parent is not None
        del parent.children[node.raw[: self._step]]
        del self.nodes[node.index]
        node.alive = False
        return parent


def _held_length(places: Int32Array) -> int:
    """Columns up to the last one in which some group holds a unit."""
    length = int(places.shape[1])
    if max(places[:, -1].tolist()) >= 0:
        return length
    if length == 1:
        return 0
    held = (places.max(axis=0) if len(places) > 1 else places[0]) >= 0
    last = int(held[::-1].argmax())
    return length - last if held[length - 1 - last] else 0


def pick(keys: list[bytes], offsets: IntArray) -> list[bytes]:
    """Keys at these offsets, in some order, without a Python step for each."""
    count = len(offsets)
    if count <= FEW_BLOCKS:
        return [keys[offset] for offset in offsets.tolist()]
    first, last = int(offsets[0]), int(offsets[-1])
    if abs(last - first) == count - 1:
        steps = np.diff(offsets)
        if (steps == 1).all():
            return keys[first : last + 1]
        if (steps == -1).all():
            return keys[last : first + 1]
    return list(itemgetter(*offsets.tolist())(keys))


def joined_or_empty(lists: list[Int32Array]) -> Int32Array:
    """One int32 array of ids, empty for no lists."""
    return np.concatenate(lists) if lists else np.empty(0, dtype=np.int32)
