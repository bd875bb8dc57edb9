"""What families share, once: blocks that a family composes."""
