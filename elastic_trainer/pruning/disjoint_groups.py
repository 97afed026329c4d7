"""Groups of channels that can be joined."""

from __future__ import annotations

from scipy.cluster.hierarchy import DisjointSet

Groups = tuple[int, ...]  # the groups of one axis, in the order in which the axis holds their channels


class DisjointGroups:
    """Disjoint groups of channels, numbered in the order of creation.

    Joined groups count as one, which has the number of its root. A fixed group keeps all its channels.
    """

    def __init__(self) -> None:
        self._joined = DisjointSet()
        self._sizes: list[int] = []
        self._fixed: set[int] = set()

    def new(self, size: int) -> Groups:
        """An axis that consists of one new group of `size` channels."""
        group = len(self._sizes)
        self._joined.add(group)
        self._sizes.append(size)
        return (group,)

    def root(self, group: int) -> int:
        """The number that stands for `group` and all groups joined with it."""
        return self._joined[group]

    def roots(self, groups: Groups) -> Groups:
        """`root` of each group of an axis."""
        return tuple(map(self.root, groups))

    def size(self, group: int) -> int:
        """Number of channels of a group."""
        return self._sizes[group]

    def is_fixed(self, group: int) -> bool:
        """Whether all channels of `group` must stay."""
        return not self._fixed.isdisjoint(self._joined.subset(group))

    def fix(self, groups: Groups) -> None:
        """Make all channels of these groups stay."""
        self._fixed.update(groups)

    def join(self, groups: Groups, others: Groups) -> Groups:
        """Join the groups of two axes pairwise. Axes of different group sizes are fixed instead.

        Returns:
            `groups`
        """
        if [self.size(group) for group in groups] != [self.size(group) for group in others]:
            self.fix((*groups, *others))
        else:
            for pair in zip(groups, others, strict=True):
                self._joined.merge(*pair)
        return groups
