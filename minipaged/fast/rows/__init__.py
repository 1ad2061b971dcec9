"""From four numbers a row, sent by the host, to all that a decode step reads: one operation, in both tiers."""
