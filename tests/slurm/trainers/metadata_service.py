"""A metadata service as a spot instance sees it; announces the end of the node once a file of its name is there.

usage: metadata_service.py PORT FOLDER SECONDS_LEFT
"""

import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        status, body = 404, ""
        notice = Path(sys.argv[2], os.uname().nodename)
        if self.command == "PUT":
            status, body = 200, "token"
        elif self.headers["X-aws-ec2-metadata-token"] != "token":
            status = 401
        elif self.path == "/latest/meta-data/spot/instance-action" and notice.exists():
            at = time.gmtime(notice.stat().st_mtime + float(sys.argv[3]))
            status, body = 200, time.strftime('{"action": "terminate", "time": "%Y-%m-%dT%H:%M:%SZ"}', at)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    do_GET = do_PUT = _answer

    def log_message(self, *_: object) -> None:
        pass


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
