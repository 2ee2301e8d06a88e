"""What the conformance suite asks: heedful's own server, and beside its tools, prompts and resources those that the
suite's scenarios ask for by name. All go through the same code. On the port that comes last, until it is ended.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from suite_texts import SuiteResources, suite_prompts
from suite_tools import suite_tools

from heedful.listening import listen
from heedful.mcp.server.files import Roots
from heedful.mcp.server.http import HttpSettings, serve_http
from heedful.mcp.server.models import ModelNames, ServedModels
from heedful.mcp.server.offer import heedful_server


async def main(port: int) -> None:
    settings = HttpSettings(port=port)
    models = ServedModels(ModelNames("smollm2", "heedful-decider", "minilm"))
    server = heedful_server(
        models,
        Roots([Path(__file__).parent]),
        more_tools=suite_tools(),
        more_prompts=suite_prompts(),
        more_resources=[SuiteResources()],
    )
    await serve_http(server, settings, listen(settings.host, settings.port))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[-1])))
