"""A socket that listens, or an error that says which part of the address cannot be had."""

from __future__ import annotations

import socket

from heedful.errors import BadParameter


def listen(host: str, port: int) -> socket.socket:
    """Bound, not yet listening. Raises BadParameter where the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except socket.gaierror as error:
        listening.close()
        raise BadParameter("--host", f"{host!r:.100} is no address: {error.strerror}") from error
    except OSError as error:
        listening.close()
        raise BadParameter("--port", f"{host}:{port} cannot be had: {error.strerror}", "Choose another one.") from error
    return listening
