"""A small server that speaks the endpoints of the Hugging Face Hub which huggingface_hub calls for one model.

Files ending in .pt or .mp4 are asked for through LFS, as the Hub does with large ones; others come inside the commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_test"
LARGE = (".pt", ".mp4")


class Hub:
    """The repositories and what was asked of them."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}  # of LFS
        self.asked: list[str] = []
        hub = self

        class Handler(_Handler):
            state = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def sha(self, repo: str) -> str:
        """Like a commit: another one for other contents."""
        listing = sorted((name, hashlib.sha1(data).hexdigest()) for name, data in self.repos[repo].items())
        return hashlib.sha1(repr(listing).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self._path()
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path):
            self._list(found[1])
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self._info(found[1])
        else:
            self._resolve(path, with_body=True)

    def do_HEAD(self) -> None:
        self._resolve(self._path(), with_body=False)

    def do_POST(self) -> None:
        path, body = self._path(), self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif found := re.fullmatch(r"/api/models/(.+?)/preupload/main", path):
            files = json.loads(body)["files"]
            modes = [{**_mode(file["path"]), "shouldIgnore": False, "oid": None} for file in files]
            self._answer(200, {"files": modes})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.state.url}/lfs/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects}, kind="application/vnd.git-lfs+json")
        elif found := re.fullmatch(r"/api/models/(.+?)/commit/main", path):
            self._commit(found[1], [json.loads(line) for line in body.splitlines() if line])
        else:
            self._answer(404, {"error": f"not known here: {path}"})

    def do_PUT(self) -> None:
        path, body = self._path(), self._body()
        oid = path.removeprefix("/lfs/")
        assert hashlib.sha256(body).hexdigest() == oid
        self.state.objects[oid] = body
        self._answer(200, {})

    def _create(self, asked: dict[str, Any]) -> None:
        repo = f"{asked.get('organization') or 'ada'}/{asked['name']}"
        code = 409 if repo in self.state.repos else 200
        self.state.repos.setdefault(repo, {})
        self.state.private.setdefault(repo, asked.get("visibility") == "private" or bool(asked.get("private")))
        self._answer(code, {"url": f"{self.state.url}/{repo}", "id": repo, "name": repo})

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        files = self.state.repos[repo]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.state.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        sha = self.state.sha(repo)
        self._answer(200, {"commitUrl": f"{self.state.url}/{repo}/commit/{sha}", "commitOid": sha})

    def _info(self, repo: str) -> None:
        if repo.endswith("broken"):
            self._answer(501, {"error": "not today"})
            return
        if repo not in self.state.repos:
            self._answer(404, {"error": "Repository not found"}, headers={"X-Error-Code": "RepoNotFound"})
            return
        siblings = [{"rfilename": name} for name in self.state.repos[repo]]
        self._answer(200, {"id": repo, "modelId": repo, "sha": self.state.sha(repo), "siblings": siblings})

    def _list(self, repo: str) -> None:
        if repo not in self.state.repos:
            self._answer(404, {"error": "Repository not found"}, headers={"X-Error-Code": "RepoNotFound"})
            return
        files = self.state.repos[repo]
        listing = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        self._answer(200, listing)

    def _resolve(self, path: str, *, with_body: bool) -> None:
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        data = self.state.repos.get(found[1], {}).get(found[3]) if found else None
        if data is None:
            self._answer(404, {"error": "Entry not found"}, headers={"X-Error-Code": "EntryNotFound"})
            return
        assert found is not None
        facts = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": self.state.sha(found[1])}
        self._send(200, data if with_body else b"", "application/octet-stream", facts, length=len(data))

    def _path(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.state.asked.append(f"{self.command} {path}")
        return path

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(
        self, code: int, value: Any, *, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        self._send(code, json.dumps(value).encode(), kind, headers or {})

    def _send(self, code: int, data: bytes, kind: str, headers: dict[str, str], *, length: int | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Content-Length": str(length or len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""


def _mode(path: str) -> dict[str, str]:
    return {"path": path, "uploadMode": "lfs" if path.endswith(LARGE) else "regular"}
