"""Groups of channels that can be joined: a union-find structure."""

from __future__ import annotations

Groups = tuple[int, ...]  # the groups of one axis, in the order in which the axis holds their channels


class DisjointGroups:
    """Disjoint groups of channels, numbered in the order of creation.

    Joined groups count as one, which has the number of its root. A fixed group keeps all its channels.
    """

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._sizes: list[int] = []
        self._fixed: set[int] = set()

    def new(self, size: int) -> Groups:
        """An axis that consists of one new group of `size` channels."""
        self._parents.append(len(self._parents))
        self._sizes.append(size)
        return (self._parents[-1],)

    def root(self, group: int) -> int:
        """The number that stands for `group` and all groups joined with it."""
        while self._parents[group] != group:
            group = self._parents[group]
        return group

    def roots(self, groups: Groups) -> Groups:
        """`root` of each group of an axis."""
        return tuple(map(self.root, groups))

    def size(self, group: int) -> int:
        """Number of channels of a group."""
        return self._sizes[self.root(group)]

    def is_fixed(self, group: int) -> bool:
        """Whether all channels of `group` must stay."""
        return self.root(group) in self._fixed

    def fix(self, groups: Groups) -> None:
        """Make all channels of these groups stay."""
        self._fixed.update(self.roots(groups))

    def join(self, groups: Groups, others: Groups) -> Groups:
        """Join the groups of two axes pairwise. Axes of different group sizes are fixed instead.

        Returns:
            `groups`
        """
        if [self.size(group) for group in groups] != [self.size(group) for group in others]:
            self.fix((*groups, *others))
            return groups
        for group, other in zip(groups, others, strict=True):
            parent, child = self.root(group), self.root(other)
            self._parents[child] = parent
            if child in self._fixed:
                self._fixed.add(parent)
        return groups
