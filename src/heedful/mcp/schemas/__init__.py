"""JSON schemas of strangers' tools: one plain form, values and arguments under them, signatures in a line."""
