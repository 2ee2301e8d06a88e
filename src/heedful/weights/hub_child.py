"""The hub's downloader, run as a program of its own by `heedful.weights.hub`: it imports nothing of heedful.

hub_child.py list REPO REVISION      prints the repository's commit, licence and files as JSON
hub_child.py fetch REPO COMMIT FOLDER FILE...
"""

from __future__ import annotations

import glob
import json
import sys


def _list(repo: str, revision: str) -> None:
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo, revision=revision or None, files_metadata=True)
    files = [
        {"path": file.rfilename, "size_bytes": file.size, "sha256": file.lfs.sha256 if file.lfs else None}
        for file in info.siblings or []
    ]
    licence = info.card_data.get("license") if info.card_data else None
    print(json.dumps({"commit": info.sha, "licence": licence, "files": files}))


def _fetch(repo: str, commit: str, folder: str, *files: str) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(repo, revision=commit, local_dir=folder, allow_patterns=[glob.escape(file) for file in files])


if __name__ == "__main__":
    if sys.argv[1] == "list":
        _list(*sys.argv[2:])
    else:
        _fetch(*sys.argv[2:])
