"""A small server that answers the GraphQL calls which wandb and wandb-workspaces make for one account."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "k" * 40


class Wandb:
    """Projects and their saved views, by name."""

    def __init__(self) -> None:
        self.views: dict[str, dict[str, dict[str, Any]]] = {}  # entity/project -> view name -> view
        self.writes: list[str] = []
        state = self

        class Handler(_Handler):
            server_state = state

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        if "upsertModel" in query:
            asked = given["input"]
            project = {key: asked[key] for key in ("name", "entityName")}
            self.views.setdefault(f"{asked['entityName']}/{asked['name']}", {})
            project |= {"id": "p", "description": "", "access": "", "views": "{}"}
            return {"result": {"project": project, "model": project, "inserted": True}}
        if "upsertView" in query:
            views = self.views[f"{given['entityName']}/{given['projectName']}"]
            assert given.get("id") in (None, views.get(given["name"], {}).get("id")), "an id belongs to its view"
            self.writes.append(given["name"])
            id = given.get("id") or f"view-{len(self.writes)}"
            views[given["name"]] = {"id": id, **{key: given[key] for key in ("displayName", "spec")}}
            return {"upsertView": {"view": {"id": id, "name": given["name"]}, "inserted": "id" not in given}}
        if "allViews" in query:
            views = self.views.get(f"{given['entityName']}/{given['name']}")
            found = None if views is None else views.get(given["viewName"])
            edges = [{"node": found}] if found else []
            return {"project": None if views is None else {"allViews": {"edges": edges}}}
        viewer = {"id": "u", "entity": "ada", "username": "ada", "email": "ada@example.org", "flags": "{}"}
        return {"viewer": {**viewer, "teams": {"edges": []}}}


class _Handler(BaseHTTPRequestHandler):
    server_state: Wandb
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path != "/graphql":  # what the library sends about itself
            self._send(200, {})
            return
        key = base64.b64decode(self.headers.get("Authorization", "").partition(" ")[2]).decode().partition(":")[2]
        if key != KEY:
            self._send(401, {"errors": [{"message": "user is not logged in"}]})
            return
        asked = json.loads(body)
        self._send(200, {"data": self.server_state.answer(asked["query"], asked.get("variables") or {})})

    def _send(self, code: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""
