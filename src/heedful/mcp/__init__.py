"""Tools of MCP servers: which servers there are (config), how to talk to them (manager), what they offer (catalog) and
which few of it a request needs (select). Needs an extra, pip install 'heedful[mcp]', imported when a server starts.
"""
