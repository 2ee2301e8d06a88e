"""Tools of MCP servers, and heedful itself as such a server. Needs an extra, pip install 'heedful[mcp]', imported when
a server starts.

From below; a folder imports only from those above it in this list, `server` from `schemas` alone:

    schemas/     tools' JSON schemas: a plain form, arguments and values under them, signatures
    settings/    which servers there are, and what the person has agreed to
    catalogue/   what they offer, and which few of it a request needs
    client/      how to talk to them: processes, connections, questions, the manager
    calls/       one call and its result
    delegation/  a request done by a tool alone
    chat/        turns with tools
    server/      heedful's own tools, prompts and files, for others
"""
