"""heedful as an MCP server: tools, prompts and files for others, over stdio and HTTP."""
