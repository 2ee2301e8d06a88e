"""A request done by a tool alone, by rules: the tool, its arguments from the request, the answer in words."""
