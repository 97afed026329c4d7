"""A fleet: one model from many boards, whose photos stay where they are. Flower carries the messages."""
