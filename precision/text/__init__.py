"""Text that comes from outside: read within bounds, and quoted in messages within bounds."""
